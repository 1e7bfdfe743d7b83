"""Checkpoints and other folders that are whole or absent.

`publish` writes folders atomically and detects damage, `replacement` replaces them, `store` keeps a
run's numbered checkpoints, `lock` makes one process the owner of a run folder. Nothing is pickled:
tensors are safetensors, everything else is JSON.
"""
