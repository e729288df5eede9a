// Sizes of the tiles. Every block has four warps.
#pragma once

namespace girih::kernels {

constexpr int kCatWarps = 4, kCatThreads = 32 * kCatWarps;

// Bytes of a tile's rows.
template <typename T, int Tile>
constexpr int kCatRowBytes = static_cast<int>(sizeof(T)) * Tile;

// Keys that a tile of queries meets at a time. Two such pairs of tiles and the queries' own come to 96 KB at
// 128 columns of 16 bits and at 256: two blocks a multiprocessor.
template <typename T, int Tile>
constexpr int kCatKeys = kCatRowBytes<T, Tile> <= 256 ? 64 : 32;
// Beside queries and dO: fp32 of 128 columns would leave room for one block a multiprocessor otherwise.
template <typename T, int Tile>
constexpr int kCatGradientKeys = kCatRowBytes<T, Tile> > 256 && sizeof(T) == 4 ? 16 : kCatKeys<T, Tile>;

// Sixteens of queries of a warp in forward. Two share what is fetched of keys and values, which is what
// bounds these products; at 256 columns their sums would not leave registers for one, and fp32 left factors
// take four times as many.
template <typename T, int Tile>
constexpr int kCatSixteens = sizeof(T) == 2 && Tile <= 128 ? 2 : 1;

// Headers of a block that it multiplies at a time: more scores would not leave registers for two sixteens of
// 128 columns.
template <int Tile>
constexpr int kCatHeaders = Tile == 64 ? 64 : 32;

// Queries that a block of 64 keys meets at a time.
template <typename T, int Tile>
constexpr int kCatQueries = kCatRowBytes<T, Tile> <= 256 ? 64
                            : sizeof(T) == 4             ? 16
                                                         : 32;
// Of these, what it multiplies at a time: beside dk and dv of 128 columns there is no room for more scores,
// and beside those of fp32 for half as many.
template <typename T, int Tile>
constexpr int kCatQueryStep = (Tile == 64 ? 64 : 32) * 2 / static_cast<int>(sizeof(T));

// Sixteens of columns in one stretch of code: products of fp32 take six instructions of one of 16 bits, and
// the multiprocessor keeps some 2,000.
template <typename T, int Tile>
constexpr int kCatUnrolled = sizeof(T) == 2 ? Tile / 16 : 2;

constexpr int kCatBlock = 64;  // keys, headers or rows of a chunk: 16 of a warp

// Columns of dk and dv that a block adds up: of wider ones there are two blocks.
template <int Tile>
constexpr int kCatColumns = Tile <= 128 ? Tile : 128;

}  // namespace girih::kernels
