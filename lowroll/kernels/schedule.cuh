// How the tiles of a product are dealt to the blocks of a grid. Plain C++ apart from its qualifiers, so that a CPU can
// prove it for every shape.
//
// Whole tiles are dealt in turns. The tiles that are left over, fewer than the blocks, come first and are shared: their
// chunks along k, in one row, are cut into nearly equal runs of at least one chunk (stream-K, Osama et al. 2023). Where
// there are fewer chunks than blocks, only as many blocks as there are chunks have a run: the blocks of a tile count each
// other, and a block without a chunk would never be counted.
#pragma once
#ifdef __CUDACC__
#define ON_DEVICE __device__ __forceinline__
#else
#define ON_DEVICE inline
#endif

// The parts of tiles that a block has: (tile, chunks from..until).
struct Run {
    int chunks, tiles, blocks, units, sharers, unit, end, whole, tile, from, until;
    ON_DEVICE Run(int chunks, int tiles, int shared, int block, int blocks)
        : chunks(chunks), tiles(tiles), blocks(blocks), units(shared * chunks), sharers(units < blocks ? units : blocks),
          unit(start_of(block)), end(start_of(block + 1)), whole(shared + block) {}
    // The first shared chunk of a block, and the block that has a shared chunk.
    ON_DEVICE int start_of(int block) const { return block < sharers ? units * block / sharers : units; }
    ON_DEVICE int owner_of(int unit) const { return ((unit + 1) * sharers - 1) / units; }
    ON_DEVICE bool next() {
        if (unit < end) {
            tile = unit / chunks, from = unit - tile * chunks, until = from + end - unit;
            if (until > chunks) until = chunks;
            unit += until - from;
            return true;
        }
        tile = whole, whole += blocks, from = 0, until = chunks;
        return tile < tiles;
    }
};
