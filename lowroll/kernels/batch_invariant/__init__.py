"""Operations whose rows have the same bits in any batch: float32 on a CPU with AVX2, Triton on a
GPU.

`rollout.exact` runs them in engine and learner, so a token's log-prob is the same in both. INT8
products need nothing: their integer sums are exact.
"""
