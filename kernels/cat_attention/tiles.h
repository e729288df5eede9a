// Sizes of the tiles of the kernels with four warps.
#pragma once

namespace girih::kernels {

constexpr int kCatWarps = 4, kCatThreads = 32 * kCatWarps;

// Bytes of a row of a tile.
template <typename T, int Tile>
constexpr int kCatRowBytes = static_cast<int>(sizeof(T)) * Tile;

// Keys of a block of keys. Two pairs of such tiles and the queries need 96 KB for 128 and for 256 columns of
// 16 bits: two blocks a multiprocessor.
template <typename T, int Tile>
constexpr int kCatKeys = kCatRowBytes<T, Tile> <= 256 ? 64 : 32;
// Keys of a block of keys beside queries and dO. With more keys, fp32 of 128 columns would have one block a
// multiprocessor.
template <typename T, int Tile>
constexpr int kCatGradientKeys = kCatRowBytes<T, Tile> > 256 && sizeof(T) == 4 ? 16 : kCatKeys<T, Tile>;

// Blocks of 16 queries of a warp in forward. Two share the loads of keys and values, which bound these
// products. At 256 columns the accumulators of two do not fit in registers; fp32 left factors need four times
// the registers.
template <typename T, int Tile>
constexpr int kCatSixteens = sizeof(T) == 2 && Tile <= 128 ? 2 : 1;

// Headers of a block that are multiplied at a time: with more scores, two blocks of 16 queries of 128 columns
// do not fit in registers.
template <int Tile>
constexpr int kCatHeaders = Tile == 64 ? 64 : 32;

// Queries of a stage of the kernels that hold 64 keys.
template <typename T, int Tile>
constexpr int kCatQueries = kCatRowBytes<T, Tile> <= 256 ? 64
                            : sizeof(T) == 4             ? 16
                                                         : 32;
// Of these, the queries that are multiplied at a time: beside dk and dv of 128 columns there are no registers
// for more scores, and for fp32 for half as many.
template <typename T, int Tile>
constexpr int kCatQueryStep = (Tile == 64 ? 64 : 32) * 2 / static_cast<int>(sizeof(T));

// Unrolled blocks of 16 columns: a product of fp32 takes six times the instructions of 16 bits, and the
// instruction cache of a multiprocessor holds about 2,000.
template <typename T, int Tile>
constexpr int kCatUnrolled = sizeof(T) == 2 ? Tile / 16 : 2;

constexpr int kCatBlock = 64;  // keys, headers or rows of a chunk of a block: 16 for each warp

// Columns of dk and dv of a block; wider rows have two blocks.
template <int Tile>
constexpr int kCatColumns = Tile <= 128 ? Tile : 128;

}  // namespace girih::kernels
