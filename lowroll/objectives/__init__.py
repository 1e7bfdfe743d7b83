"""Policy objectives: pure functions of prepared tokens.

A function of a row takes `surrogate.ObjectiveInput` and options, and returns the tokens' values, to
be maximised, and statistics. `Objective` makes one scalar J of it: it takes [B, T] tensors with a
mask, or packed [N] tensors with `segments`, prepares the tokens, and averages the values. Only
`learner` carries gradient. `table` lists the rows, without torch;
`objective.select(algorithm, correction)` combines two names.
"""
