"""Policy objectives: pure functions of prepared tokens.

A row's function takes `ratios.ObjectiveInput` and options, and returns the tokens' values, to be
maximised, and statistics. `Objective` reduces them to one scalar J, for [B, T] tensors with a mask
or packed [N] tensors with `segments`. Only `learner` carries gradient.
"""
