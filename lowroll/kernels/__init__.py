"""Kernels: Triton on CUDA tensors, plain torch elsewhere. The public modules import without Triton."""
