"""Transport of rollouts to the trainer: channels, the codec, and the log of rollouts.

A channel moves a Batch without changing a byte of it. Every wait has a deadline and an error that
names what it waited for.
"""
