"""Policy objectives: pure functions of log-probs, advantages and masks.

Each takes keywords only, [B, T] tensors with a mask or packed [N] tensors with `segments`, and
returns the objective J to maximise (a differentiable scalar; only `learner` carries gradient) and a
dict of statistics. `table` lists them by name, without torch; `objective.select(algorithm,
correction)` combines two names. `kl.penalty` is the KL to a reference, `mismatch` the distance
between sampler and learner (`by_length` of each class of lengths, `spread` its distribution),
`reduce.count` the denominators that make micro-batches add up. `value.value_loss` is the critic's,
to minimise.
"""
