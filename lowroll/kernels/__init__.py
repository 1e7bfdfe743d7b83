"""Fused kernels of a decode step and a training step.

Every public function works on every device: in Triton or CUDA C++ for CUDA tensors, elsewhere in
plain torch, the definition that tests compare with. A launch depends on shapes alone, allocates
only its outputs and never waits for the device, so CUDA graphs can capture it. No float is added
atomically, so results repeat bit for bit. Kernels for CPUs leave small inputs to torch, whose bits
small models keep.

`supports` functions say whether a kernel can run (`support`); `dispatch` lists kernels by product.
A file holds its entry function first, plain torch next, and Triton kernels last.

Terms:

    row       the vector of one token or sequence: M, T or B of them in a matrix of activations
    channel   an out feature: one row of a weight matrix, N of them (quantize/ calls it a row)
    group     weights of a channel, side by side, that share a scale; a block in the formats that say so
    tile      the piece of a larger tensor that a program makes, or reads at a time
    program   one block of threads, as Triton calls it; the grid says how many there are
    slot      moe/: one choice of one token, token * S + choice. attention/: a token of the cache,
              page * P + offset
    place     moe/: where a slot lies once slots are sorted by expert
    layout    the order in which a tensor's elements lie in memory
    early     a kernel that starts before the one ahead of it has ended (`launch`)
"""
