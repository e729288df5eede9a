// Sizes of the tiles. Every block has four warps.
#pragma once

namespace girih::kernels {

constexpr int kCatWarps = 4, kCatThreads = 32 * kCatWarps;

// Keys that a tile of queries meets at a time. Two such pairs of tiles and the queries' own come to 96 KB at
// 128 columns and at 256: two blocks a multiprocessor.
template <int Tile>
constexpr int kCatKeys = Tile <= 128 ? 64 : 32;

// Sixteens of queries of a warp in forward. Two share what is fetched of keys and values, which is what
// bounds these products; at 256 columns their sums would not leave registers for one.
template <int Tile>
constexpr int kCatSixteens = Tile <= 128 ? 2 : 1;

// Headers of a block that it multiplies at a time: more scores would not leave registers for two sixteens of
// 128 columns.
template <int Tile>
constexpr int kCatHeaders = Tile == 64 ? 64 : 32;

// Queries that a block of 64 keys meets at a time.
template <int Tile>
constexpr int kCatQueries = Tile <= 128 ? 64 : 32;
// Of these, what it multiplies at a time: beside dk and dv of 128 columns there is no room for more scores.
template <int Tile>
constexpr int kCatQueryStep = Tile == 64 ? 64 : 32;

constexpr int kCatBlock = 64;  // keys, headers or rows of a chunk: 16 of a warp

// Columns of dk and dv that a block adds up: of wider ones there are two blocks.
template <int Tile>
constexpr int kCatColumns = Tile <= 128 ? Tile : 128;

}  // namespace girih::kernels
