"""User data sets: rows, columns, and Python reward functions. Without torch."""
