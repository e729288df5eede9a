// Chunks of a block in the kernels that compute all chunks in parallel. A warp has a tile of 16 tokens and
// computes reads of both memories; shared memory has one of them at a time.
#pragma once

#include "trellis/reads.cuh"

namespace girih::kernels {

// Two chunks a block if a chunk has at most two tiles. Larger blocks would not fill the shared memory of a
// multiprocessor.
__host__ __device__ constexpr int chunks_per_block(int tiles) { return tiles > 2 ? 1 : 2; }
__host__ __device__ constexpr int tiles_per_chunk(int chunk) { return (chunk + kTokenTile - 1) / kTokenTile; }

struct ChunkBlockShape {
  int tiles, chunks, threads;  // tiles of a chunk; chunks and threads of the block
  __host__ __device__ static ChunkBlockShape of(int chunk) {
    const int tiles = tiles_per_chunk(chunk), chunks = chunks_per_block(tiles);
    return {tiles, chunks, tiles * chunks * 32};
  }
  __host__ __device__ int rows() const { return tiles * chunks * kTokenTile; }
};

// Bytes of shared memory: a memory for each chunk, the tokens' rows of `tensors` tensors, and gates.
template <typename T, int Width>
__host__ __device__ constexpr int chunk_bytes(const ChunkBlockShape& block, int tensors) {
  return block.chunks * SharedTile<T, Width, Width>::kBytes +
         block.rows() * (tensors * Width * 2 + static_cast<int>(sizeof(TokenGate)));
}

template <typename T, int Width>
struct TrellisChunkWarp {
  using TensorTile = SharedTile<T, kTokenTile, Width>;
  using Memory = SharedTile<T, Width, Width>;
  static constexpr int N = Width / 8, K = Width / 16;

  const TrellisShape& shape;
  ChunkBlockShape block;
  unsigned char *shared, *tiles;   // memories; tiles of tokens
  int head, chunk_in_block, tile;  // chunk of the block, tile of the chunk
  int64_t number;                  // number of the chunk in the grid (time/chunks.h)
  NumberedChunk numbered_chunk;
  Chunk chunk;
  int rows;  // tokens of the warp's tile
  MapSlots map_slots;

  __device__ TrellisChunkWarp(const TrellisShape& shape, unsigned char* shared)
      : shape(shape),
        block(ChunkBlockShape::of(shape.grid.size)),
        shared(shared),
        tiles(shared + block.chunks * Memory::kBytes),
        head(static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.heads))),
        chunk_in_block(warp_index() / block.tiles),
        tile(warp_index() % block.tiles),
        number(blockIdx.x / static_cast<unsigned>(shape.heads) * int64_t{block.chunks} + chunk_in_block),
        map_slots{0, shape.slots} {
    numbered_chunk = number < chunk_count(shape.grid) ? chunk_at(shape.grid, number) : NumberedChunk{};
    chunk = number < chunk_count(shape.grid) ? chunk_of(shape.grid, numbered_chunk.of, numbered_chunk.index)
                                             : Chunk{0, 0, false};
    rows = max(0, min(chunk.length - tile * kTokenTile, kTokenTile));
  }

  __device__ int64_t batch() const { return numbered_chunk.of.sequence.batch; }
  __device__ int64_t token() const { return chunk.start + tile * kTokenTile; }  // token 0 of the warp's tile
  __device__ int first_row() const { return (chunk_in_block * block.tiles + tile) * kTokenTile; }

  // ---- tiles -------------------------------------------------------------------------------------------

  __device__ Memory memory() const {
    return {reinterpret_cast<T*>(shared + chunk_in_block * Memory::kBytes)};
  }
  // Tile j of the warp's chunk in a tensor.
  __device__ TensorTile tile_of(int tensor, int j) const {
    unsigned char* data =
        tiles + (tensor * block.rows() + (chunk_in_block * block.tiles + j) * kTokenTile) * Width * 2;
    return {reinterpret_cast<T*>(data)};
  }
  __device__ TensorTile own_tile(int tensor) const { return tile_of(tensor, tile); }
  // Starts the copies of the warp's tile of a tensor.
  __device__ void load(int tensor, const InputTensor<4>& x, int width) const {
    load_async<32>(own_tile(tensor), row_of<T>(x, batch(), token(), head), x.stride[1], rows, width, lane());
  }
  // Starts the warp's share of the copies of the chunk's memory.
  __device__ void load_memory(const void* memories) const {
    const T* from = static_cast<const T*>(memories) + stored_memory_offset<Width>(shape, number, head);
    T* to = memory().data;
    for (int i = tile * 32 + lane(); i < Width * Width / 8; i += 32 * block.tiles) {
      copy_async(shared_address(to + 8 * i), from + 8 * i, chunk.length > 0);
    }
  }
  // Starts the copies of the gates of the warp's tile, which lie behind `tensors` tensors.
  __device__ void load_gates(const TokenGate* gates, int tensors) {
    gates_ = reinterpret_cast<TokenGate*>(tiles + tensors * block.rows() * Width * 2) +
             chunk_in_block * block.tiles * kTokenTile;
    kernels::load_gates(gates_ + tile * kTokenTile, shape, gates, batch(), rows == 0 ? 0 : token(), rows,
                        head);
  }
  // Gates of tile j.
  __device__ const TokenGate* gates_of(int j) const { return gates_ + j * kTokenTile; }

  // ---- reads -------------------------------------------------------------------------------------------

  // Loads the warp's tile of a tensor as an A fragment.
  __device__ void load_a_fragment(AFragment<K>& a, int tensor) const { load_blocks(a, own_tile(tensor)); }
  // Loads the warp's tile of a tensor as fp32.
  __device__ void load_fp32(Accumulator<N>& x, int tensor) const {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      Accumulator<2> part;
      load_block_fp32<T>(part, own_tile(tensor), 0, 16 * k);
      for_each_register<2>([&](int j, int i) { x.at[2 * k + j][i] = part.at[j][i]; });
    }
  }

  // y = A_t w_t, with A in memory() and x, u in tensors xs, us.
  __device__ void compute_read(Accumulator<N>& y, const AFragment<K>& w, int xs, int us) const {
    fill(y, 0.f);
    add_product_transposed<T>(y, w, memory());
    complete_read(y, w, xs, us);
  }
  // y = A_t^T l_t.
  __device__ void compute_transposed_read(Accumulator<N>& y, const AFragment<K>& l, int us, int xs) const {
    fill(y, 0.f);
    add_product<T>(y, l, memory());
    complete_read(y, l, us, xs);
  }

  __device__ void store(int tensor, const Accumulator<N>& x) const {
    AFragment<K> rounded;
    round_to_a_fragment<T>(rounded, x);
    store_blocks(own_tile(tensor), 0, 0, rounded);
  }
  // Stores x to global memory through the warp's tile of `tensor`, which no other warp reads.
  __device__ void store_result(const OutputTensor<4>& to, int width, const Accumulator<N>& x,
                               int tensor) const {
    __syncwarp();
    store(tensor, x);
    __syncwarp();
    store_rows_of_tile(to, width, tensor);
  }
  __device__ void store_rows_of_tile(const OutputTensor<4>& to, int width, int tensor) const {
    if (rows == 0) return;
    store_rows<1>(own_tile(tensor), row_of<T>(to, batch(), token(), head), to.stride[1], rows, width, 0);
  }

 private:
  TokenGate* gates_;

  __device__ void complete_read(Accumulator<N>& y, const AFragment<K>& w, int dot_tensor,
                                int sum_tensor) const {
    decay_and_add_intra_chunk<T>(
        y, w, tile, [&](int j) { return tile_of(dot_tensor, j); },
        [&](int j) { return tile_of(sum_tensor, j); }, [&](int j) { return gates_of(j); });
  }
};

// Launches a block for each head and group of chunks.
template <auto Kernel, typename T, int Width, class Problem>
cudaError_t launch_chunks(const Problem& p, int tensors, cudaStream_t stream) {
  const auto block = ChunkBlockShape::of(p.shape.grid.size);
  int limit = 0;
  if (const cudaError_t error = shared_limit(limit); error != cudaSuccess) return error;
  const int bytes = chunk_bytes<T, Width>(block, tensors);
  if (bytes > limit) return cudaErrorInvalidValue;
  const int64_t blocks = (chunk_count(p.shape.grid) + block.chunks - 1) / block.chunks * p.shape.heads;
  return launch_kernel<Kernel>(p, blocks, block.threads, bytes, stream, limit);
}

}  // namespace girih::kernels
