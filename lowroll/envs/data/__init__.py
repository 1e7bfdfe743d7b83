"""User data sets: sources of rows, columns, and Python reward functions. Without torch."""
