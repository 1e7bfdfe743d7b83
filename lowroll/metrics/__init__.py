"""Reports of a run: names that are explained once, one JSON line a step, a live view, a page."""
