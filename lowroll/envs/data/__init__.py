"""Data sets that people bring: where rows come from, which column is what, and Python reward
functions. No torch."""
