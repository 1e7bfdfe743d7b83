"""Kernels: what a decode step and a training step do on a GPU, fused.

Every public function takes tensors and works on every device. For CUDA tensors it launches one or
two kernels, in Triton or CUDA C++; elsewhere it is a few lines of plain torch, which are the
definition and what the tests compare with. A launch depends on shapes alone, allocates its outputs
alone and never waits for the device, so all of them can be captured in a graph; none adds floats
atomically, so all of them repeat bit for bit.

Which kernel runs is asked as `supports` (`support`); `dispatch` lists them by product, and `lowroll
doctor` prints the list. A file has the function that others call first, plain torch next, and its
Triton kernels (`_what_kernel`, and what they share) last. CUDA sources lie beside the file that
launches them.

Words, the same in every file:

    row       the vector of one token or one sequence: M, T or B of them in a matrix of activations
    channel   an out feature: one row of a weight matrix, N of them; quantize/, which knows one matrix
              alone, calls it a row
    group     weights of a channel, side by side, that share a scale; a block in the formats that say so
    tile      the piece of a larger tensor that a program makes, or reads at a time
    program   one block of threads, as Triton calls it; the grid says how many there are
    slot      moe/: one choice of one token, token * S + choice. attention/: a token of the cache,
              page * P + offset
    place     moe/: where a slot lies once slots are sorted by expert
    layout    the order in which a tensor's elements lie in memory
    early     a kernel that starts before the one ahead of it has ended (`launch`)
"""
