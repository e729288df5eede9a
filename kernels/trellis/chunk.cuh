// Chunks of a block in the kernels that compute all chunks in parallel. A warp has a tile of 16 tokens, and
// reads either memory.
#pragma once

#include "trellis/reads.cuh"

namespace girih::kernels {

// Two chunks a block if a chunk has at most two tiles. Larger blocks would not fill the shared memory of a
// multiprocessor.
__host__ __device__ constexpr int chunks_of_block(int tiles) { return tiles > 2 ? 1 : 2; }
__host__ __device__ constexpr int tiles_of(int chunk) { return (chunk + kTile - 1) / kTile; }

struct ChunkBlock {
  int tiles, chunks, threads;  // of a chunk, of the block, of the block
  __host__ __device__ static ChunkBlock of(int chunk) {
    const int tiles = tiles_of(chunk), chunks = chunks_of_block(tiles);
    return {tiles, chunks, tiles * chunks * 32};
  }
  __host__ __device__ int rows() const { return tiles * chunks * kTile; }
};

// Bytes of shared memory: a memory for each chunk, `tokens` tiles for each 16 tokens, and gates.
template <typename T, int Tile>
__host__ __device__ constexpr int chunk_bytes(const ChunkBlock& block, int tokens) {
  return block.chunks * SharedTile<T, Tile, Tile>::kBytes +
         block.rows() * (tokens * Tile * 2 + static_cast<int>(sizeof(TokenGate)));
}

template <typename T, int Tile>
struct TrellisChunk {
  using Rows = SharedTile<T, kTile, Tile>;
  using Memory = SharedTile<T, Tile, Tile>;
  static constexpr int N = Tile / 8, K = Tile / 16;

  const TrellisShape& shape;
  ChunkBlock block;
  unsigned char *shared, *tiles;  // memories; tiles of tokens
  int head, local, tile;          // `local`: chunk in the block; `tile`: tile in the chunk
  int64_t number;                 // number of the chunk in the grid
  NumberedChunk place;
  Chunk chunk;
  int rows;  // tokens of the warp's tile
  Columns columns;

  __device__ TrellisChunk(const TrellisShape& shape, unsigned char* shared)
      : shape(shape),
        block(ChunkBlock::of(shape.grid.size)),
        shared(shared),
        tiles(shared + block.chunks * Memory::kBytes),
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
  __device__ int64_t token() const { return chunk.start + tile * kTile; }  // token 0 of the warp's tile
  __device__ int first_row() const { return (local * block.tiles + tile) * kTile; }

  // ---- tiles -------------------------------------------------------------------------------------------

  __device__ Memory memory() const { return {reinterpret_cast<T*>(shared + local * Memory::kBytes)}; }
  // Tile `j` of the warp's chunk in tensor `which`.
  __device__ Rows rows_of(int which, int j) const {
    unsigned char* at = tiles + (which * block.rows() + (local * block.tiles + j) * kTile) * Tile * 2;
    return {reinterpret_cast<T*>(at)};
  }
  __device__ Rows own(int which) const { return rows_of(which, tile); }
  // Starts the copies of the warp's tile of a tensor.
  __device__ void load(int which, const In<4>& x, int width) const {
    load_async<32>(own(which), row_of<T>(x, batch(), token(), head), x.stride[1], rows, width, lane());
  }
  // Starts the warp's share of the copies of the chunk's memory.
  __device__ void load_memory(const void* memories) const {
    const T* from = static_cast<const T*>(memories) + kept_place<T, Tile>(shape, number, head);
    T* to = memory().data;
    for (int i = tile * 32 + lane(); i < Tile * Tile / 8; i += 32 * block.tiles) {
      copy_async(shared_address(to + 8 * i), from + 8 * i, chunk.length > 0);
    }
  }
  // Starts the copies of the gates of the warp's tile; they lie behind `tokens` tensors.
  __device__ void load_gates(const TokenGate* gates, int tokens) {
    tokens_ =
        reinterpret_cast<TokenGate*>(tiles + tokens * block.rows() * Tile * 2) + local * block.tiles * kTile;
    kernels::load_gates(tokens_ + tile * kTile, shape, gates, batch(), rows == 0 ? 0 : token(), rows, head);
  }
  // Gates of tile j.
  __device__ const TokenGate* gates_of(int j) const { return tokens_ + j * kTile; }

  // ---- reads -------------------------------------------------------------------------------------------

  // Loads the warp's tile of a tensor as an A fragment.
  __device__ void left(Operand<K>& a, int which) const { load_blocks(a, own(which)); }
  // Loads the warp's tile of a tensor as fp32.
  __device__ void wide(Sums<N>& x, int which) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Sums<2> part;
      load_wide<T>(part, own(which), 0, 16 * k);
      each_sum<2>([&](int j, int i) { x.at[2 * k + j][i] = part.at[j][i]; });
    }
  }

  // y = A_t w_t, with A in memory().
  __device__ void read(Sums<N>& y, const Operand<K>& w, int xs, int us) const {
    fill(y, 0.f);
    add_product_transposed<T>(y, w, memory());
    finish(y, w, xs, us);
  }
  // y = A_t^T l_t.
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
  // Stores to a tensor through tile `which`, which no other warp reads.
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
  TokenGate* tokens_;

  __device__ void finish(Sums<N>& y, const Operand<K>& w, int xs, int us) const {
    finish_read<T>(
        y, w, tile, [&](int j) { return rows_of(xs, j); }, [&](int j) { return rows_of(us, j); },
        [&](int j) { return gates_of(j); });
  }
};

// Launches a block for each head and group of chunks.
template <auto Kernel, typename T, int Tile, class Problem>
cudaError_t launch_chunks(const Problem& p, int tokens, cudaStream_t stream) {
  const auto block = ChunkBlock::of(p.shape.grid.size);
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int bytes = chunk_bytes<T, Tile>(block, tokens);
  if (bytes > limit) return cudaErrorInvalidValue;
  const int64_t blocks = (chunk_count(p.shape.grid) + block.chunks - 1) / block.chunks * p.shape.heads;
  return launch_kernel<Kernel>(p, blocks, block.threads, bytes, stream, limit);
}

}  // namespace girih::kernels
