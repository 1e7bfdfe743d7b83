"""The KV cache, and the policies that bound it.

Legend: L layers, S slots, B rows, T tokens, P pages of the longest row, H query heads, G key-value
heads, d head size, N keys, K keys that stay.
"""
