"""Transport of rollouts to the trainer."""
