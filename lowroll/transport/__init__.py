"""Transport of rollouts to the trainer: channels, the codec, and the log of rollouts."""
