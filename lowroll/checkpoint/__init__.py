"""Checkpoints and other folders that are whole or absent. Nothing is pickled: tensors are
safetensors, everything else is JSON.
"""
