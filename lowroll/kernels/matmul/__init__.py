"""Products with matrices of every format, few rows and many.

Legend: M rows of activations, N out features (channels), K in features.
"""
