"""Norms, rotations and gates between products, with the codes of the next product.

Legend: T tokens, D features, F intermediate size, H query heads, G key-value heads, d head size, P
programs.
"""
