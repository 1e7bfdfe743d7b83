"""Checkpoints and other folders that must be whole or absent.

`publish` writes folders atomically and detects damage, `store` keeps a run's numbered checkpoints,
`lock` makes one process the owner of a run folder, `files` writes single files atomically, `seal`
checksums JSON lines, `space` waits on a full disk. Without pickle: tensors are safetensors,
everything else is JSON.
"""
