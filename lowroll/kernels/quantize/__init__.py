"""Codes of activations and weights, and the rotation before them.

Legend: M rows of activations, N rows of a matrix, K features or columns.
"""
