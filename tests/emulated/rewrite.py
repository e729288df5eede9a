"""Kernels' sources as emulator.h runs them: what is an instruction of the GPU becomes a call."""

import re
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[2] / "kernels"

# The bodies of functions in kernels/tile, kernels/pipe and beside the kernels, by a part of their signature.
BODIES = {
    "tile/matrix.h": {
        "uint32_t pair_of<__nv_bfloat16>": """
            return emulated_pair(__float2bfloat16_rn(low), __float2bfloat16_rn(high));""",
        "uint32_t pair_of<__half>": "return emulated_pair(__float2half_rn(low), __float2half_rn(high));",
        "float2 unpaired<__half>": """uint16_t bits[2] = {uint16_t(pair), uint16_t(pair >> 16)};
            __half both[2]; memcpy(both, bits, 4); return {__half2float(both[0]), __half2float(both[1])};""",
        "void load_matrices(": "emulated::load_matrices(to, address, false);",
        "void load_matrices_transposed(": "emulated::load_matrices(to, address, true);",
        "uint32_t transpose_pairs": """
            const uint32_t y = emulated::transpose_pairs(x); __syncwarp(); return y;""",
        "void mma<__nv_bfloat16>": "emulated::multiply(d, a, b0, b1, unpaired<__nv_bfloat16>);",
        "void mma<__half>": "emulated::multiply(d, a, b0, b1, unpaired<__half>);",
        "float exp2_fast": """
            const float y = std::exp2(x); return std::fpclassify(y) == FP_SUBNORMAL ? 0.f : y;""",
        "float reciprocal(": "return 1.f / x;",
    },
    "tile/shared.h": {
        "uint32_t shared_address": "return static_cast<uint32_t>(reinterpret_cast<uint64_t>(pointer));",
        "void copy_async(": "emulated::start_copy(to, valid ? from : nullptr, 16);",
        "void copy_async_8(": "emulated::start_copy(to, valid ? from : nullptr, 8);",
        "void copy_async_4(": "emulated::start_copy(to, valid ? from : nullptr, 4);",
        "void commit_copies": "emulated::close_group();",
        "void wait_copies": "emulated::finish_groups(Pending);",
        "void prefetch(": "",
        "void barrier_wait(": "emulated::wait_at(id, threads);",
        "void init_barrier(": "emulated::phases(barrier) = {uint16_t(arrivals), uint16_t(arrivals), 0};",
        "void arrive(": "emulated::arrive(barrier);",
        "void arrive_once(": "__syncwarp(); if (emulated::lane() == 0) emulated::arrive(barrier);",
        "void arrive_after_copies(": """
            emulated::close_group(); emulated::finish_groups(0); emulated::arrive(barrier);""",
        "void wait(": "while ((emulated::phases(barrier).phase & 1) == parity) emulated::yield();",
    },
    "tile/cluster.h": {
        "int cluster_rank(": "return static_cast<int>(emulated::current->block->number % 2);",
        "void cluster_wait(": """
            emulated::wait_at(emulated::cluster_barrier, emulated::cluster_size * emulated::threads);""",
        "void publish_barriers(": "",
        "uint32_t far_address(": """
            return static_cast<uint32_t>(reinterpret_cast<uint64_t>(emulated::far(here, rank)));""",
        "void arrive_far(": """
            __syncwarp();
            if (emulated::lane() == 0) emulated::arrive((uint64_t*)emulated::far(barrier, rank));""",
        "void send(": "emulated::send(from, bytes, barrier, rank);",
    },
    "tile/boxes.h": {
        "cudaError_t describe(": """
            emulated::Boxes of{tensor.data, {}, {}, rows};
            std::copy(tensor.stride, tensor.stride + 4, of.stride), std::copy(sizes, sizes + 4, of.size);
            memcpy(&boxes, &of, sizeof of); return cudaSuccess;""",
        "void arrive_expecting(": "emulated::arrive_expecting(barrier, bytes);",
        "void copy_box(": "emulated::send_box(to, &boxes, at.col, at.row, at.head, at.batch, barrier);",
        "void prefetch_box(": "",
        "void copy_bytes(": "emulated::send_bytes(to, from, bytes, barrier);",
    },
    "tile/row_store.h": {"void store_pack(": "memcpy(to, x, 16);"},
    "tile/pack.h": {},
    "tile/warpgroup.h": {
        "Sums<N>& sums, const BlockTile<T, Cols>& x,": """
            emulated::start_products([&sums, x, y, row] {
              if (!Add) fill(sums, 0.f);
              for (int col = 0; col < Cols; col += 16) {
                uint32_t a[4];
                load_block(a, x, 16 * group_warp(), col);
                add_product_transposed<T>(sums, a, y, row, col);
              }
            });""",
        "Sums<N>& sums, const Operand<K>& a,\n                                                const": """
            emulated::start_products([&sums, &a, y, col] {
              if (!Add) fill(sums, 0.f);
              for (int k = 0; k < K; ++k) {
                uint32_t left[4];
                with_sign<Sign>(left, a.at[k]);
                add_product_transposed<T>(sums, left, y, 0, col + 16 * k);
              }
            });""",
        "Sums<N>& sums, const BlockTile<T, XCols>& x, int x_col,": """
            emulated::start_products([&sums, x, x_col, y, col] {
              for (int k = 0; k < 64; k += 16) {
                uint32_t a[4];
                load_block(a, x, 16 * group_warp(), x_col + k);
                with_sign<Sign>(a, a);
                add_product<T>(sums, a, y, k, col);
              }
            });""",
        "void start_product(Sums<N>& sums, const Operand<K>& a,": """
            emulated::start_products([&sums, &a, y, col, row] {
              for (int k = 0; k < K; ++k) {
                uint32_t left[4];
                with_sign<Sign>(left, a.at[k]);
                add_product<T>(sums, left, y, row + 16 * k, col);
              }
            });""",
        "void commit_products(": "emulated::commit_products();",
        "void wait_products(": "emulated::wait_products(Pending);",
    },
    "tile/launch.h": {
        "cudaError_t allow_shared(": "return cudaSuccess;",
        "cudaError_t shared_limit(": "bytes = emulated::kSharedBytes; return cudaSuccess;",
        "cudaError_t has_clusters(": "has = true; return cudaSuccess;",
        "cudaError_t has_warpgroups(": "has = true; return cudaSuccess;",
    },
    "pipe/card.h": {"cudaError_t processor_count(": "count = 4; return cudaSuccess;"},
    "pipe/memory.h": {},
    "pipe/roots.h": {"float inverse_root(": "return 1.f / std::sqrt(x);"},
    "pipe/clusters.h": {
        "cudaError_t launch_clusters(": """
            emulated::launch([=] { Kernel(p); }, blocks, threads, bytes, size); return cudaSuccess;""",
    },
    "trellis/maps.cuh": {
        "float tanh_fast(": "return std::tanh(x);",
    },
}
BEFORE_PAIRS = "// Two neighbouring elements as one register"
PAIR = """
template <class T>
inline uint32_t emulated_pair(T low, T high) {
  const T both[2] = {low, high};
  uint32_t pair;
  memcpy(&pair, both, sizeof pair);
  return pair;
}
"""


def with_body(source: str, signature: str, body: str) -> str:
    """The source, in which the function's definition has this body."""
    begin = source.index("{", source.index(signature))
    depth, end = 0, begin
    while depth or end == begin:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    return f"{source[:begin]}{{ {body} }}{source[end:]}"


def rewritten(file: str) -> str:
    source = (KERNELS / file).read_text()
    for signature, body in BODIES.get(file, {}).items():
        source = with_body(source, signature, body)
    if file in ("tile/boxes.h", "tile/cluster.h", "cat_attention/sm90/space.cuh"):
        source = re.sub("#if __CUDA_ARCH__ >= 900.*", "#if true", source)
    if file == "tile/matrix.h":
        source = source.replace(BEFORE_PAIRS, PAIR + BEFORE_PAIRS)
    source = source.replace(
        "__ushort_as_half(static_cast<unsigned short>(raw.bits))",
        "[&] { uint16_t bits = raw.bits; __half half; memcpy(&half, &bits, 2); return half; }()",
    )
    source = re.sub(
        r"extern __shared__ \w+\(\d+\) (unsigned char|float) shared\[\];",
        r"\1* const shared = reinterpret_cast<\1*>(emulated::current->block->shared);",
        source,
    )
    source = re.sub(
        r"([\w<>, ]+?)\s*<<<(.*?),\s*([^,]*?),\s*(.*?),\s*stream>>>\(p\);",
        r"emulated::launch([=] { \1(p); }, \2, \3, \4);",
        source,
        flags=re.DOTALL,
    )
    if file.startswith("cat_attention/sm90/"):
        # Rings that are soon full: who waits for a place, or gives one back too early, is seen.
        source = re.sub(r"kStages = Tile == 64 \? \d : \d", "kStages = 2", source)
    source = source.replace("cudaGetLastError()", "cudaSuccess")
    header = {"tile/boxes.h": "copy_engine.h", "tile/warpgroup.h": "products.h"}.get(file, "emulator.h")
    return source.replace("#pragma once\n", f'#pragma once\n#include "{header}"\n', 1)


def write(folder: Path, operator: str) -> None:
    """An operator's kernels and what they include of tile and pipe."""
    sources = [p for p in (KERNELS / operator).rglob("*") if p.is_file()]
    files = [*BODIES, *(p.relative_to(KERNELS).as_posix() for p in sources)]
    for file in sorted(set(files)):
        if file.startswith(("tile/", "pipe/", f"{operator}/")):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(rewritten(file))
