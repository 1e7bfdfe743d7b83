"""Checkpoints and other folders that are whole or absent. Tensors are safetensors, everything else
is JSON; nothing is pickled.
"""
