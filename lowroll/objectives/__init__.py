"""Policy objectives: pure functions of log-probs, advantages and masks.

Each takes keywords only, [B, T] tensors with a mask or packed [N] tensors with `segments`, and
returns the objective J to maximise (a differentiable scalar; only `learner` carries gradient) and a
dict of statistics. `table` lists them, without torch; `objective.select(algorithm, correction)`
combines two names.
"""
