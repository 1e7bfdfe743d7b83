"""From logits to tokens: penalties, filters, noise, the draw and its log-prob.

Legend: B rows, V vocabulary.
"""
