"""What a run says about itself: names that are explained once, one JSON line a step, a live view, a
report."""
