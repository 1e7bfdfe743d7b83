"""Attention of decoded rows and of prompts, over the paged cache or packed keys.

Legend: B rows, T tokens, S sequences, H query heads, G key-value heads, d head size, p pages of the
cache, P tokens of a page, N pages of a table row, L = N * P, F fine channels of an 8-bit key.
"""
