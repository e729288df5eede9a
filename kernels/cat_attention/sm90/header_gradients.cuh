// The terms of dk and dv of headers from later chunks on sm_90: a block has 128 headers, 64 for each
// warpgroup, and loads tiles of 64 queries through a ring.
//
//     P^T = e^{scale K Q^T - lse}    dV += P^T dO    dA^T = P^T * (V dO^T - delta)    dK += dA^T Q
#pragma once

#include "cat_attention/header_list.h"
#include "cat_attention/sm90/storage.cuh"

namespace girih::kernels {

struct CatSm90HeaderGradients {
  CatHeaderGradients call;
  TensorMap k, v;     // 64 headers
  TensorMap q, dout;  // 64 rows of a head
  CatHeaderList list;
};

constexpr int kCatSm90Queries = 64;

template <typename T, int Tile>
struct CatSm90HeaderStorage {
  static constexpr int kStages = ring_stages(Tile == 64 ? 8 : 4);
  using Rows = BlockTile<T, Tile>;
  struct Barriers {
    FullBarriers<1> keys_full;
    EmptyBarriers<1> keys_empty;
    FullBarriers<kStages> full;
    EmptyBarriers<kStages> empty;
  };
  static constexpr int kRecordBytes = kCatSm90Queries * static_cast<int>(sizeof(CatQueryRecord));
  static constexpr int kStage = 2 * Rows::kBytes + kRecordBytes;
  static_assert(kStage % 1024 == 0);
  static constexpr int kBytes = 4 * Rows::kBytes + kStages * kStage + static_cast<int>(sizeof(Barriers));
  static_assert(kBytes <= kCatSm90MaxBytes);

  unsigned char* shared;

  // The tile of a warpgroup.
  __device__ Rows keys(int group) const { return {reinterpret_cast<T*>(shared + group * Rows::kBytes)}; }
  __device__ Rows values(int group) const { return keys(2 + group); }
  __device__ unsigned char* stage(int n) const { return shared + 4 * Rows::kBytes + n * kStage; }
  __device__ Rows queries(int n) const { return {reinterpret_cast<T*>(stage(n))}; }
  __device__ Rows gradients(int n) const { return {reinterpret_cast<T*>(stage(n) + Rows::kBytes)}; }
  __device__ CatQueryRecord* query_records(int n) const {
    return reinterpret_cast<CatQueryRecord*>(stage(n) + 2 * Rows::kBytes);
  }
  __device__ Barriers& barriers() const {
    return *reinterpret_cast<Barriers*>(shared + 4 * Rows::kBytes + kStages * kStage);
  }
  __device__ void init() const {
    Barriers& all = barriers();
    all.keys_full.init(1);
    all.keys_empty.init(arrival_count(kCatSm90MmaWarps));
    all.full.init(1);
    all.empty.init(arrival_count(kCatSm90MmaWarps));
  }
};

// Calls f(run) for the part of every item in the block's run.
template <class F>
__device__ inline void for_each_item(const CatSm90HeaderGradients& p, const F& f) {
  const int64_t end = min((blockIdx.x + 1) * p.list.run, p.list.entries);
  for (int64_t at = blockIdx.x * p.list.run; at < end;) {
    const CatHeaderRun run(p.call.shape, p.list, blockIdx.x, at, end);
    f(run);
    at += run.entry_end - run.entry;
  }
}

// Called by one warp; one thread loads.
template <typename T, int Tile>
__device__ inline void run_header_loader(const CatSm90HeaderGradients& p,
                                         const CatSm90HeaderStorage<T, Tile>& space) {
  using Storage = CatSm90HeaderStorage<T, Tile>;
  if (lane() != 0) return;
  const CatShape& shape = p.call.shape;
  auto& barriers = space.barriers();
  PipelineState turn, item;
  for_each_item(p, [&](const CatHeaderRun& run) {
    int i = run.next(run.entry);
    if (i == run.entry_end) return;
    barriers.keys_empty.wait(item);
    item.next(1);
    arrive_expect_tx(barriers.keys_full.at(0), 4 * Storage::Rows::kBytes);
    for (int group = 0; group < 2; ++group) {
      const TmaCoords at{0, run.header + 64 * group, run.head, run.batch};
      copy_rows(space.keys(group), p.k, at, barriers.keys_full.at(0));
      copy_rows(space.values(group), p.v, at, barriers.keys_full.at(0));
    }
    for (; i < run.entry_end; i = run.next(i + 1)) {
      const int row = run.row_at(i), head = run.head_at(shape, i), place = turn.stage;
      const int bytes = min(kCatSm90Queries, shape.rows - row) * static_cast<int>(sizeof(CatQueryRecord));
      barriers.empty.wait(turn);
      arrive_expect_tx(barriers.full.at(place), 2 * Storage::Rows::kBytes + bytes);
      copy_rows(space.queries(place), p.q, {0, row, head, run.batch}, barriers.full.at(place));
      copy_rows(space.gradients(place), p.dout, {0, row, head, run.batch}, barriers.full.at(place));
      const int64_t at = (int64_t{run.batch} * shape.query_heads + head) * shape.rows + row;
      bulk_load(space.query_records(place), p.call.queries + at, bytes, barriers.full.at(place));
      turn.next(Storage::kStages);
    }
  });
}

template <typename T, int Tile>
struct CatSm90HeaderMainloop {
  using Storage = CatSm90HeaderStorage<T, Tile>;
  using Scores = Accumulator<kCatSm90Queries / 8>;

  const CatSm90HeaderGradients& p;
  const Storage& space;
  typename Storage::Barriers& barriers;
  const float scale;  // in units of log2
  const int group;    // index of the warpgroup
  PipelineState turn;
  Accumulator<Tile / 8> dk, dv;

  __device__ CatSm90HeaderMainloop(const CatSm90HeaderGradients& p, const Storage& space)
      : p(p),
        space(space),
        barriers(space.barriers()),
        scale(p.call.shape.scale * kLog2E),
        group(warp_index() / 4) {}

  // S^T becomes P^T for the warp's headers from `header`. All: every query attends to all of them; otherwise
  // the first `queries` queries are masked by their records, and the rest are 0.
  template <bool All>
  __device__ void weights(Scores& s, const CatQueryRecord* query_records, int header, int queries) const {
    for_each_register_pair<kCatSm90Queries / 8>([&](int n, int j) {
      const int at = 8 * n + lane_col() + j;
      const CatQueryRecord query = query_records[at];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int h = header + lane_row() + 8 * i;
        const bool visible = All || (at < queries && query.first <= h && h < query.chunk);
        float& x = s.at[n][2 * i + j];
        x = visible ? exp2_fast(fmaf(scale, x, -query.lse)) : 0.f;
      }
    });
  }
  // P^T becomes P^T * (dP^T - delta). Masked elements stay 0, as delta may be undefined there.
  template <bool All>
  __device__ void gradients(Scores& s, const Scores& dp, const CatQueryRecord* query_records) const {
    for_each_register_pair<kCatSm90Queries / 8>([&](int n, int j) {
      const float delta = query_records[8 * n + lane_col() + j].delta;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& x = s.at[n][2 * i + j];
        const float by = dp.at[n][2 * i + j] - delta;
        x = All || x != 0.f ? x * by : 0.f;
      }
    });
  }

  __device__ void process_queries(const CatHeaderRun& run, int row) {
    const int queries = min(kCatSm90Queries, p.call.shape.rows - row), header = run.header + 64 * group;
    barriers.full.wait(turn);
    const CatQueryRecord* const query_records = space.query_records(turn.stage);
    const CatQueryRecord low = query_records[0], high = query_records[queries - 1];
    const int own = header + 16 * warpgroup_warp();
    if (header < max(low.chunk, high.chunk)) {
      const bool all = queries == kCatSm90Queries && low.first <= own && high.first <= own &&
                       own + 16 <= min(low.chunk, high.chunk);
      Scores s, dp;
      wgmma_fence(s, dp, dk, dv);
      wgmma_start_transposed<false>(s, space.keys(group), space.queries(turn.stage));
      wgmma_commit();
      wgmma_start_transposed<false>(dp, space.values(group), space.gradients(turn.stage));
      wgmma_commit();
      wgmma_wait<1>(s);
      if (all) {
        weights<true>(s, query_records, own, queries);
      } else {
        weights<false>(s, query_records, own, queries);
      }
      AFragment<kCatSm90Queries / 16> left, other;
      round_to_a_fragment<T>(left, s);
      wgmma_fence();
      wgmma_start<T>(dv, left, space.gradients(turn.stage));
      wgmma_commit();
      wgmma_wait<1>(dp);
      if (all) {
        gradients<true>(s, dp, query_records);
      } else {
        gradients<false>(s, dp, query_records);
      }
      round_to_a_fragment<T>(other, s);
      wgmma_fence();
      wgmma_start<T>(dk, other, space.queries(turn.stage));
      wgmma_commit();
      wgmma_wait<0>(dk, dv);
      keep_registers(left), keep_registers(other);
    }
    barriers.empty.arrive_warp(turn.stage);
    turn.next(Storage::kStages);
  }

  __device__ void store(const CatHeaderRun& run) const {
    constexpr int kEight = 8 * Tile, kValues = 2 * 64 * Tile;
    float* const to =
        p.call.partials + run.place + (64 * group + 16 * warpgroup_warp() + lane_row()) * Tile + lane_col();
    for_each_register_pair<Tile / 8>([&](int n, int i) {
      float* const at = to + i * kEight + 8 * n;
      *reinterpret_cast<float2*>(at) = {dk.at[n][2 * i], dk.at[n][2 * i + 1]};
      *reinterpret_cast<float2*>(at + kValues) = {dv.at[n][2 * i], dv.at[n][2 * i + 1]};
    });
  }

  __device__ void run() {
    PipelineState item;
    for_each_item(p, [&](const CatHeaderRun& run) {
      fill(dk, 0.f), fill(dv, 0.f);
      int i = run.next(run.entry);
      if (i < run.entry_end) {
        barriers.keys_full.wait(item);
        item.next(1);
#pragma unroll 1
        for (; i < run.entry_end; i = run.next(i + 1)) process_queries(run, run.row_at(i));
        barriers.keys_empty.arrive_warp(0);
      }
      store(run);
    });
  }
};

template <typename T, int Tile>
__global__ void __launch_bounds__(kCatSm90Threads, 1)
    cat_header_gradients_sm90_kernel(const __grid_constant__ CatSm90HeaderGradients p) {
  if constexpr (kIsCatSm90Compiled) {
    GIRIH_DYNAMIC_SHARED(unsigned char, shared, 1024);
    const CatSm90HeaderStorage<T, Tile> space{shared};
    run_warp_roles<CatSm90Registers<240, 24>>([&] { space.init(); }, [&] { run_header_loader(p, space); },
                                              [&] { CatSm90HeaderMainloop<T, Tile>(p, space).run(); });
  }
}

template <typename T, int Tile>
cudaError_t has_cat_sm90(bool& has) {
  return has_warpgroups<cat_header_gradients_sm90_kernel<T, Tile>>(has);
}

template <typename T, int Tile>
cudaError_t launch_cat_header_gradients_sm90(const CatHeaderGradients& call, cudaStream_t stream) {
  constexpr auto kKernel = cat_header_gradients_sm90_kernel<T, Tile>;
  using Storage = CatSm90HeaderStorage<T, Tile>;
  const CatShape& shape = call.shape;
  CatSm90HeaderGradients p{call, {}, {}, {}, {}, CatHeaderList(shape, Tile, sm90_header_list_sizes<Tile>())};
  if (p.list.runs == 0) return cudaSuccess;
  const auto headers = [&](TensorMap& boxes, const InputTensor<4>& x, int width) {
    return describe_rows(boxes, x, shape, shape.chunks.tokens, shape.size, shape.heads, width, 64);
  };
  const auto rows = [&](TensorMap& boxes, const InputTensor<4>& x, int width) {
    return describe_rows(boxes, x, shape, shape.rows, 1, shape.query_heads, width, kCatSm90Queries);
  };
  for (const cudaError_t error : {headers(p.k, call.k, shape.D), headers(p.v, call.v, shape.V),
                                  rows(p.q, call.q, shape.D), rows(p.dout, call.dout, shape.V)}) {
    if (error != cudaSuccess) return error;
  }
  return launch_kernel<kKernel>(p, p.list.runs, kCatSm90Threads, Storage::kBytes, stream);
}

}  // namespace girih::kernels
