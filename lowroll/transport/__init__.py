"""Rollouts on their way to the trainer: channels, the codec that they speak, and the log of what was
sent.

A channel moves a Batch and never changes a byte of it; which one carries it is a choice of deployment.
Every wait has a deadline and an error that names what it waited for.
"""
