"""Operations whose rows have the same bits in any batch: on a CPU with AVX2 in float32, on a GPU in Triton.

What `rollout.exact` is made of: decoding, prefilling and the learner run these, so a token's log-prob
is the same number wherever it is computed. Each sums in one order, by its row alone. Forward passes
alone are meant: a gradient is that of the plain operation (`gradient.with_gradient_of`).

    rows         norms with the residual before them, and silu(gate) * up
    heads        norm and rotation of queries and keys
    attention    of queries over keys where they lie
    product      with a matrix of plain numbers

Products of INT8 codes need nothing: their sums are exact integers.
"""
