"""Operations whose rows have the same bits in any batch: float32 on a CPU with AVX2, Triton on a
GPU.

`rollout.exact` runs these in the engine and the learner, so a token's log-prob is the same number
everywhere. Gradients are those of the plain operations (`gradient.with_gradient_of`).

    rows         norms with the residual before them, and silu(gate) * up
    heads        norm and rotation of queries and keys
    attention    of queries over keys where they lie
    product      with a matrix of plain numbers

INT8 products need nothing: their integer sums are exact.
"""
