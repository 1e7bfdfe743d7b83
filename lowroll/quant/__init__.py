"""Weight formats: the QTensor, the table of formats, one file a format.

Legend: N out features, K in features, M rows of activations, G groups (blocks) of a row, S weights
of a group, B bytes of a row.
"""
