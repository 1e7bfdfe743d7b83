"""Fused kernels of a decode step and a training step.

CUDA tensors go to Triton or CUDA C++, all others to plain torch, the definition that tests compare
with. A launch depends on shapes alone, allocates only its outputs and never waits for the device,
so CUDA graphs can capture it. No float is added atomically, so results repeat bit for bit. CPU
kernels leave small inputs to torch.

`supports` functions say whether a kernel can run (`support`). The docstring of a folder has the
letters of its shapes.

Terms:

    channel   an out feature: one row of a weight matrix (a row in quantize/)
    group     neighbouring weights of a channel that share a scale; in some formats a block
    program   one block of threads of a Triton kernel
    slot      moe/: one choice of one token, token * S + choice
              attention/: a token of the cache, page * P + offset
    place     moe/: the index of a slot once slots are sorted by expert, then by slot
"""
