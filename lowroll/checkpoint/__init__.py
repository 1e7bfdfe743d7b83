"""Checkpoints and every other folder that must be either whole or absent.

`publish` makes a folder appear atomically and proves later that it is undamaged, `store` keeps the
numbered checkpoints of a run on top of it, `lock` lets one process at a time own a run folder.
`files` does for a single file what `publish` does for a folder, `seal` lets a line of JSON show its
damage, `space` waits for room on a full disk. No pickle anywhere: tensors are safetensors,
everything else is JSON.
"""
