"""Checkpoints and other folders that must be whole or absent.

`publish` writes folders atomically and detects damage, `store` keeps a run's numbered checkpoints,
`lock` makes one process the owner of a run folder, `files` writes single files atomically,
`line_checksum` checksums JSON lines, `disk_space` waits on a full disk. Nothing is pickled: tensors
are safetensors, everything else is JSON.
"""
