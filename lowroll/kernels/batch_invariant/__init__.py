"""Operations whose rows have the same bits in any batch: float32 on a CPU with AVX2, Triton on a
GPU.

`rollout.exact` runs them in the engine and the learner, so a token's log-prob is the same number
everywhere. Gradients are those of the plain operations (`gradient`). INT8 products need nothing:
their integer sums are exact.
"""
