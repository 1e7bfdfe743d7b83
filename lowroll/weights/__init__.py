"""Weights from the learner's masters to the engine: calibration, quantization, publication and
sync.
"""
