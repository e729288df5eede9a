// Chunks that a block has beside each other, as those kernels read them that take every chunk by itself: a
// warp has a tile of 16 tokens, and of both memories what reads of them need.
#pragma once

#include "trellis/reads.cuh"

namespace girih::kernels {

// Chunks of a block: as many as fill four warps, but of wide memories no more than two.
template <int Tile>
__host__ __device__ constexpr int chunks_of_block(int tiles) {
  return 4 / tiles < (Tile == 64 ? 4 : 2) ? 4 / tiles : (Tile == 64 ? 4 : 2);
}
__host__ __device__ constexpr int tiles_of(int chunk) { return (chunk + kTile - 1) / kTile; }

struct ChunkBlock {
  int tiles, chunks, threads;  // tiles of a chunk, chunks of the block
  template <int Tile>
  __host__ __device__ static ChunkBlock of(int chunk) {
    const int tiles = tiles_of(chunk), chunks = chunks_of_block<Tile>(tiles);
    return {tiles, chunks, tiles * chunks * 32};
  }
  __host__ __device__ int rows() const { return tiles * chunks * kTile; }
};

// What a kernel has in shared memory: so many memories a chunk, tiles of the block's tokens, and of every
// token four numbers and one more for each of its chunk's tiles.
template <typename T, int Tile>
__host__ __device__ constexpr int chunk_bytes(const ChunkBlock& block, int memories, int tokens) {
  return memories * block.chunks * SharedTile<T, Tile, Tile>::kBytes +
         block.rows() * (tokens * Tile * 2 + 16 + 4 * block.tiles);
}

template <typename T, int Tile>
struct TrellisChunk {
  using Rows = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  static constexpr int N = Tile / 8, K = Tile / 16;

  const TrellisShape& shape;
  ChunkBlock block;
  unsigned char *shared, *tiles;  // memories, tiles of tokens
  int head, local, tile;          // the warp's chunk in the block and tile in the chunk
  int64_t number;                 // of the warp's chunk
  NumberedChunk place;
  Chunk chunk;
  int rows;  // tokens of the warp's tile
  Columns columns;

  __device__ TrellisChunk(const TrellisShape& shape, unsigned char* shared, int memories = 1)
      : shape(shape),
        block(ChunkBlock::of<Tile>(shape.grid.size)),
        shared(shared),
        tiles(shared + memories * block.chunks * Memory::kBytes),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.heads))),
        local(warp_index() / block.tiles),
        tile(warp_index() % block.tiles),
        number(blockIdx.x / static_cast<unsigned>(shape.heads) * int64_t{block.chunks} + local),
        columns{0, shape.slots} {
    place = number < chunk_count(shape.grid) ? chunk_at(shape.grid, number) : NumberedChunk{};
    chunk =
        number < chunk_count(shape.grid) ? chunk_of(shape.grid, place.of, place.index) : Chunk{0, 0, false};
    rows = max(0, min(chunk.length - tile * kTile, kTile));
  }

  __device__ int64_t batch() const { return place.of.sequence.batch; }
  __device__ int64_t token() const { return chunk.start + tile * kTile; }  // the warp's first
  __device__ int first_row() const { return (local * block.tiles + tile) * kTile; }

  // ---- tiles -------------------------------------------------------------------------------------------

  __device__ Memory memory(int which = 0) const {
    return {reinterpret_cast<T*>(shared + (which * block.chunks + local) * Memory::kBytes)};
  }
  // Tile `j` of the warp's chunk, of the block's tensor `which`.
  __device__ Rows rows_of(int which, int j) const {
    unsigned char* at = tiles + (which * block.rows() + (local * block.tiles + j) * kTile) * Tile * 2;
    return {reinterpret_cast<T*>(at)};
  }
  __device__ Rows own(int which) const { return rows_of(which, tile); }
  __device__ float* gates(int tokens) const {
    return reinterpret_cast<float*>(tiles + tokens * block.rows() * Tile * 2);
  }

  // Starts the warp's tile of a tensor.
  __device__ void load(int which, const In<4>& x, int width) const {
    load_async<32>(own(which), row_of<T>(x, batch(), token(), head), x.stride[1], rows, width, lane());
  }
  // Starts the chunk's memory, [M, X] of all chunks: a share of every warp of the chunk.
  __device__ void load_memory(const void* memories, int width, int which = 0) const {
    const T* from = static_cast<const T*>(memories) + (number * shape.heads + head) * shape.M * width;
    constexpr int kPacks = Tile / 8;
    const int have = chunk.length > 0 ? shape.M : 0;
    for (int i = tile * 32 + lane(); i < Tile * kPacks; i += 32 * block.tiles) {
      const int m = i / kPacks, x = i % kPacks * 8;
      copy_async(memory(which).address(m, x), from + m * width + x, m < have && x < width);
    }
  }
  // The chunk goes on in one that was begun before: A' is not A.
  __device__ bool resumed(const In<4>& first) const { return first.data != nullptr && place.index == 0; }
  // A' of such a chunk in the place of A.
  __device__ void load_first(const In<4>& first, int width) const {
    const auto* from =
        static_cast<const float*>(first.data) + offset_of(first, place.of.sequence.index, head);
    for (int i = tile * 32 + lane(); i < Tile * Tile; i += 32 * block.tiles) {
      const int m = i / Tile, x = i % Tile;
      const bool has = m < shape.slots && x < width && chunk.length > 0;
      memory().at(m, x) = from_float<T>(has ? from[m * first.stride[2] + x * first.stride[3]] : 0.f);
    }
  }

  // ---- gates -------------------------------------------------------------------------------------------

  // Of the chunk's tokens, in units of log2: L_t and L_C - L_t; gamma_t; and a number that kernels keep
  // there.
  float *through, *lost, *after, *gamma, *kept;

  // By every warp, of its chunk, for its own tile; seen by the others after the block's next barrier. L_C.
  __device__ float load_gates(const In<3>& gammas, const In<3>& g, int tokens) {
    through = gates(tokens) + local * block.tiles * kTile;
    lost = through + block.rows(), after = lost + block.rows(), gamma = after + block.rows(),
    kept = gamma + block.rows();
    const GatePair pair = kernels::load_gates(gammas, g, batch(), chunk, head);
    const GateSums sums(pair);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = 2 * lane() + i;
      if (t / kTile != tile) continue;
      through[t] = sums.through[i], lost[t] = sums.lost[i], after[t] = sums.after[i],
      gamma[t] = pair.gamma[i];
    }
    return __shfl_sync(~0u, sums.after[0] + pair.gate[0], 0);
  }
  // Rows lane_row() and 8 further of the warp's tile.
  __device__ float2 of_rows(const float* values) const {
    return {values[tile * kTile + lane_row()], values[tile * kTile + lane_row() + 8]};
  }

  __device__ TileGates gates_of(int j) const {
    return {through + j * kTile, lost + j * kTile, gamma + j * kTile};
  }
  __device__ Through own_through() const { return Through(gates_of(tile)); }
  // Tokens of tile j.
  __device__ int rows_in(int j) const { return min(chunk.length - j * kTile, kTile); }

  // ---- reads -------------------------------------------------------------------------------------------

  // The warp's tile of a tensor as a left factor.
  __device__ void left(Operand<K>& a, int which) const {
    load_left(a, own(which));
  }
  // The same as fp32.
  __device__ void wide(Sums<N>& x, int which) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Sums<2> part;
      load_wide<T>(part, own(which), 0, 16 * k);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) x.at[2 * k + j][i] = part.at[j][i];
      }
    }
  }

  // A_t w_t, with the memory in its place.
  __device__ void read(Sums<N>& y, const Operand<K>& w, int xs, int us) const {
    fill(y, 0.f);
    add_product_transposed<T>(y, w, memory());
    finish(y, w, xs, us);
  }
  // A_t^T l_t.
  __device__ void read_transposed(Sums<N>& y, const Operand<K>& l, int us, int xs) const {
    fill(y, 0.f);
    add_product<T>(y, l, memory());
    finish(y, l, us, xs);
  }

  __device__ void store(int which, const Sums<N>& x) const {
    Operand<K> rounded;
    round_to<T>(rounded, x);
    store_blocks(own(which), 0, 0, rounded);
  }
  // The warp's tile to a tensor, by way of tile `which`, which nobody else reads.
  __device__ void store_out(const Out<4>& to, int width, const Sums<N>& x, int which) const {
    __syncwarp();
    store(which, x);
    __syncwarp();
    put_rows(to, width, which);
  }
  __device__ void put_rows(const Out<4>& to, int width, int which) const {
    if (rows == 0) return;
    store_rows<1>(own(which), row_of<T>(to, batch(), token(), head), to.stride[1], rows, width, 0);
  }

 private:
  __device__ void finish(Sums<N>& y, const Operand<K>& w, int xs, int us) const {
    finish_read<T>(
        y, w, tile, [&](int j) { return rows_of(xs, j); }, [&](int j) { return rows_of(us, j); },
        [&](int j) { return gates_of(j); });
  }
};

// A block for every head and so many chunks.
template <auto Kernel, typename T, int Tile, class Problem>
cudaError_t launch_chunks(const Problem& p, int memories, int tokens, cudaStream_t stream) {
  const auto block = ChunkBlock::of<Tile>(p.shape.grid.size);
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int bytes = chunk_bytes<T, Tile>(block, memories, tokens);
  if (bytes > limit) return cudaErrorInvalidValue;
  if (const cudaError_t error = allow_shared<Kernel>(limit); error != cudaSuccess) return error;
  const int64_t blocks = (chunk_count(p.shape.grid) + block.chunks - 1) / block.chunks * p.shape.heads;
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  Kernel<<<static_cast<unsigned>(blocks), block.threads, bytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace girih::kernels
