"""Operations of a bounded cache on its keys: record, score, choose, move.

Legend: L layers, S slots, A queries of the window, B rows, H query heads, G key-value heads, d head
size, p pages of the cache, P pages of a row, N keys, K keys that stay.
"""
