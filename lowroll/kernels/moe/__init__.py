"""Mixtures of experts: scores, routing, and products of rows with the matrices of their experts.

Legend: T tokens, S choices a token, P = T S slots, E experts, N out features, K in features, D
hidden size, F width of an expert.
"""
