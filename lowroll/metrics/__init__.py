"""Reports of a run: documented names, one JSON line a step, a live view, a page."""
