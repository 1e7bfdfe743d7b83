"""Fused kernels: what a decode step and a training step do between the matrix products, and the
low-bit products.

Every public function takes tensors and works on every device. For CUDA tensors it launches one or
two Triton kernels; elsewhere it is a few lines of plain torch, which are the definition and what
the tests compare with. A launch depends on shapes alone, allocates its outputs alone and never
waits for the device, so all of them can be captured in a graph; none adds floats atomically, so all
of them repeat bit for bit.
"""
