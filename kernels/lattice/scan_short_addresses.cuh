// Addresses for the ldmatrix and stmatrix accesses of the state warps of scan_short.cuh, kept in registers.
// Without them the compiler recomputes the addresses after every barrier.
#pragma once

#include "lattice/scan_short_ring.cuh"

namespace girih::kernels::lattice {

// ldmatrix addresses of the lane, in bytes, for a tile at the start of a stage: offset(0, 16 i, lane() & 15,
// (lane() >> 4) * 8).
struct TileAddresses {
  int stage;
  uint32_t columns[4];
  uint32_t rows[4];  // the same, from the warp's vector 0 on
  uint32_t own;      // the same for the warp's columns of H
};

// A tile `offset` bytes after the stage's start, with rows of 128 bytes. IsOwn: only the warp's columns.
template <class Tile, bool IsOwn = false>
struct AddressedTile : Tile {
  const uint32_t* addresses;
  int offset;
  __device__ uint32_t address(int row, int col, int, int) const {
    constexpr int kRow = Tile::kCols * static_cast<int>(sizeof(typename Tile::Element));
    static_assert(kRow == 128);
    return addresses[IsOwn ? 0 : col / 16] + offset + row * kRow;
  }
};

// Addresses of a warp that has 16 vectors from `first` on.
template <class Ring>
class AddressBuilder {
  using S = typename Ring::S;
  using Rows = typename S::Keys;
  static constexpr int kElement = sizeof(typename Ring::T);

  const Ring& ring;
  const int first;
  const uint32_t start, lane_place;

 public:
  __device__ AddressBuilder(const Ring& ring, int first)
      : ring(ring),
        first(first),
        start(opaque(shared_address(ring.base))),
        lane_place(opaque(kElement * Rows::offset(0, 0, lane() & 15, (lane() >> 4) * 8))) {}

  __device__ TileAddresses for_stage(int stage) const {
    const uint32_t base = start + stage * Ring::kStageBytes;
    TileAddresses at;
    at.stage = stage;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      at.columns[i] = opaque(base + (lane_place ^ (kElement * 16 * i)));
      at.rows[i] = opaque(at.columns[i] + kElement * first * S::D);
    }
    at.own = opaque(base + (lane_place ^ (kElement * first)));
    return at;
  }

  __device__ AddressedTile<Rows> tokens(const TileAddresses& at, typename Ring::TokenTile which) const {
    return {ring.tokens(at.stage, which), at.columns, Ring::offset_of(which)};
  }
  __device__ AddressedTile<Rows, true> own_tokens(const TileAddresses& at,
                                                  typename Ring::TokenTile which) const {
    return {ring.tokens(at.stage, which), &at.own, Ring::offset_of(which)};
  }
  __device__ AddressedTile<typename S::Memory, true> own_memory(const TileAddresses& at) const {
    return {ring.memory(at.stage), &at.own, 0};
  }
  // The warp's vectors of S^T.
  __device__ AddressedTile<Rows> vectors(const TileAddresses& at) const {
    return {Rows{ring.memory(at.stage).data + first * S::D}, at.rows, 0};
  }
};

}  // namespace girih::kernels::lattice
