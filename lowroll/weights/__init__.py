"""Weights from the learner to the engine: calibration, quantization, publication and sync."""
