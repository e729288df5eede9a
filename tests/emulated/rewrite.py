"""Kernels' sources as emulator.h runs them: what is an instruction of the GPU becomes a call."""

import os
import re
from pathlib import Path

# Or a copy of them, to see that tests fail of what is wrong there.
KERNELS = Path(os.environ.get("GIRIH_KERNELS") or Path(__file__).resolve().parents[2] / "kernels")
# What operators include, or link, beside their own, kernels/tile and kernels/pipe.
ALSO = {
    "gla": ("gsa", "fp32"),
    "gsa": ("fp32",),
    "trellis": ("gsa", "fp32"),
}
HALVES = ("__half", "__nv_bfloat16")
# What is compiled as in a build, for tests that call an operator's functions: every pattern's files at once.
FP32 = tuple(f"fp32/{name}.cu" for name in ("scan", "key_read", "value_read", "gate_gradient"))
UNITS = {
    "delta_product": (
        *(f"delta_product/fp32_{name}.cu" for name in ("rows", "scan", "gradients")),
        "delta_product/channel_beta_rows.cu",
        *(f"instances/delta_product/channel_beta_gradients_{type}.cu" for type in HALVES),
    ),
    "skinny_gemm": ("skinny_gemm/skinny_gemm.cu",),
    "gla": (
        *(f"instances/{of}{type}.cu" for of in ("gla/*", "gsa/dkv_") for type in HALVES),
        *("gla/step.cu", "gla/[gh]*.cu", "gsa/[js]*n.cu", *FP32),
    ),
    "lattice": tuple(f"lattice/{name}.cu" for name in ("fp32_scan", "fp32_backward", "step")),
    "gsa": (
        *(f"instances/gsa/*{type}.cu" for type in HALVES),
        *("gsa/step.cu", "gsa/[fg]*.cu", "gsa/[js]*n.cu"),
        *(*FP32, "fp32/abc.cu", "fp32/feature.cu"),
    ),
    "linear_path": tuple(f"linear_path/{name}.cu" for name in ("virtual_rows", "running_sum", "gates")),
    "elementwise": tuple(
        f"elementwise/{name}.cu" for name in ("cross_entropy", "residual_norm", "rotary", "silu_product")
    ),
    "gate_activations": ("gate_activations/gate_activations.cu",),
    "trellis": (
        *(f"trellis/{name}.cu" for name in ("fp32_scan", "fp32_read_map", "fp32_reverse", "fp32_dkv")),
        "trellis/step.cu",
        *(f"fp32/{name}.cu" for name in ("key_read", "value_read")),
    ),
}

# The bodies of functions in kernels/tile, kernels/pipe and beside the kernels, by a part of their signature.
BODIES = {
    "tile/matrix.h": {
        "uint32_t pack_pair<__nv_bfloat16>": """
            return emulated_pair(__float2bfloat16_rn(low), __float2bfloat16_rn(high));""",
        "uint32_t pack_pair<__half>": "return emulated_pair(__float2half_rn(low), __float2half_rn(high));",
        "float2 unpack_pair<__half>": """uint16_t bits[2] = {uint16_t(pair), uint16_t(pair >> 16)};
            __half both[2]; memcpy(both, bits, 4); return {__half2float(both[0]), __half2float(both[1])};""",
        "void ldmatrix(": "emulated::ldmatrix(to, address, false);",
        "void ldmatrix_trans(": "emulated::ldmatrix(to, address, true);",
        "uint32_t transpose_pairs": """
            const uint32_t y = emulated::transpose_pairs(x); __syncwarp(); return y;""",
        "void mma<__nv_bfloat16>": "emulated::multiply(d, a, b0, b1, unpack_pair<__nv_bfloat16>);",
        "void mma<__half>": "emulated::multiply(d, a, b0, b1, unpack_pair<__half>);",
        "float exp2_fast": """
            const float y = std::exp2(x); return std::fpclassify(y) == FP_SUBNORMAL ? 0.f : y;""",
        "float reciprocal(": "return 1.f / x;",
    },
    "tile/shared.h": {
        "uint32_t shared_address": "return static_cast<uint32_t>(reinterpret_cast<uint64_t>(pointer));",
        "T* pin_address(": "return shared;",
        "void copy_async(": "emulated::start_copy(to, valid ? from : nullptr, 16);",
        "void copy_async_8(": "emulated::start_copy(to, valid ? from : nullptr, 8);",
        "void copy_async_4(": "emulated::start_copy(to, valid ? from : nullptr, 4);",
        "void commit_copies": "emulated::close_group();",
        "void wait_copies": "emulated::finish_groups(Pending);",
        "void prefetch(": "",
        "void named_barrier_sync(": "emulated::wait_at(id, threads);",
        "void init_barrier(": "emulated::phases(barrier) = {uint16_t(arrivals), uint16_t(arrivals), 0, 0};",
        "void arrive(": "emulated::arrive(barrier); emulated::yield();",
        "void arrive_warp(": "__syncwarp(); if (emulated::lane() == 0) emulated::arrive(barrier);",
        "void arrive_after_copies(": """
            emulated::close_group(); emulated::finish_groups(0); emulated::arrive(barrier);""",
        "void wait(": "emulated::wait_for(barrier, parity);",
    },
    "tile/cluster.h": {
        "int cluster_rank(": "return static_cast<int>(emulated::current->block->number % 2);",
        "void cluster_sync(": """
            emulated::wait_at(emulated::cluster_barrier, emulated::cluster_size * emulated::threads);""",
        "void fence_barrier_init(": "",
        "uint32_t map_shared_address(": """
            return static_cast<uint32_t>(reinterpret_cast<uint64_t>(emulated::far(here, rank)));""",
        "void arrive_remote(": """
            __syncwarp();
            if (emulated::lane() == 0) emulated::arrive((uint64_t*)emulated::far(barrier, rank));""",
        "void copy_to_remote(": "emulated::copy_to_remote(from, bytes, barrier, rank);",
    },
    "tile/tma.h": {
        "cudaError_t encode_tensor_map(": """
            emulated::TensorMap of{tensor.data, {}, {}, rows};
            std::copy(tensor.stride, tensor.stride + 4, of.stride), std::copy(sizes, sizes + 4, of.size);
            memcpy(&tensor_map, &of, sizeof of); return cudaSuccess;""",
        "void arrive_expect_tx(": "emulated::arrive_expect_tx(barrier, bytes);",
        "void tma_load(": """emulated::tma_load(
            to, &tensor_map, coords.col, coords.row, coords.head, coords.batch, barrier);""",
        "void tma_prefetch(": "",
        "void bulk_load(": "emulated::bulk_load(to, from, bytes, barrier);",
    },
    "tile/row_store.h": {"void store_pack(": "memcpy(to, x, 16);"},
    "tile/pack.h": {},
    "tile/strided_elements.h": {},
    "tile/partials.h": {},
    "tile/warpgroup.h": {
        "Accumulator<N>& sums, const BlockTile<T, Cols>& x,": """
            emulated::check_fence(sums, Add);
            emulated::start_products([&sums, x, y, row] {
              if (!Add) fill(sums, 0.f);
              for (int col = 0; col < Cols; col += 16) {
                uint32_t a[4];
                load_block(a, x, 16 * warpgroup_warp(), col);
                add_product_transposed<T>(sums, a, y, row, col);
              }
            });""",
        "void wgmma_start_transposed(Accumulator<N>& sums, const AFragment<K>& a,": """
            emulated::check_fence(sums, Add), emulated::check_fence(a);
            emulated::start_products([&sums, &a, y, col] {
              if (!Add) fill(sums, 0.f);
              for (int k = 0; k < K; ++k) {
                uint32_t left[4];
                copy_signed<Sign>(left, a.at[k]);
                add_product_transposed<T>(sums, left, y, 0, col + 16 * k);
              }
            });""",
        "Accumulator<N>& sums, const BlockTile<T, XCols>& x, int x_col,": """
            emulated::check_fence(sums, true);
            emulated::start_products([&sums, x, x_col, y, col] {
              for (int k = 0; k < 64; k += 16) {
                uint32_t a[4];
                load_block(a, x, 16 * warpgroup_warp(), x_col + k);
                copy_signed<Sign>(a, a);
                add_product<T>(sums, a, y, k, col);
              }
            });""",
        "void wgmma_start(Accumulator<N>& sums, const AFragment<K>& a,": """
            emulated::check_fence(sums, true), emulated::check_fence(a);
            emulated::start_products([&sums, &a, y, col, row] {
              for (int k = 0; k < K; ++k) {
                uint32_t left[4];
                copy_signed<Sign>(left, a.at[k]);
                add_product<T>(sums, left, y, row + 16 * k, col);
              }
            });""",
        "void fence_async_proxy(": "emulated::fence();",
        "void wgmma_commit(": "emulated::wgmma_commit();",
        "void wgmma_wait(": "emulated::wgmma_wait(Pending, sums...);",
        "void wgmma_fence(": "emulated::fence_registers(sums...);",
    },
    "tile/launch.h": {
        "cudaError_t allow_shared(": "return cudaSuccess;",
        "cudaError_t shared_limit(": "bytes = emulated::shared_bytes; return cudaSuccess;",
        "cudaError_t has_clusters(": "has = true; return cudaSuccess;",
        "cudaError_t has_warpgroups(": "has = true; return cudaSuccess;",
        "cudaError_t has_tma(": "has = true; return cudaSuccess;",
    },
    "pipe/device.h": {
        "cudaError_t processor_count(": "count = emulated::processors; return cudaSuccess;",
    },
    "pipe/state_store.h": {},
    "pipe/rsqrt.h": {"float rsqrt_fast(": "return 1.f / std::sqrt(x);"},
    "pipe/clusters.h": {
        "cudaError_t launch_clusters(": """
            emulated::launch([=] { Kernel(p); }, blocks, threads, bytes, size); return cudaSuccess;""",
    },
    "tile/tf32.h": {"void mma_tf32(": "emulated::multiply_tf32(d, a, b0, b1);"},
    "delta_product/fp32_matrix_warps.cuh": {"void mma_f64(": "emulated::multiply_f64(d, a, b);"},
    "skinny_gemm/skinny_gemm.cu": {"uint4 load_streaming(": "uint4 x; memcpy(&x, from, 16); return x;"},
    "trellis/maps.cuh": {
        "float tanh_fast(": "return std::tanh(x);",
    },
}
# What else stands differently, by file: patterns, and what comes in their place.
START = r"fill\({0}\[0\], 0\.f\), fill\({0}\[1\], 0\.f\);\s+{1}<T>\(\s*{0}, {2},\s+(\[&\].*?\}})\);\n"
STARTED = """
  emulated::check_fence({0}[0], false), emulated::check_fence({0}[1], false), emulated::check_fence({2});
  emulated::start_products([&{0}, &{2}, x] {{
    fill({0}[0], 0.f), fill({0}[1], 0.f);
    {1}<T>({0}, {2}, \\1);
  }});
"""
ALIGNED = r"emulated::check_alignment({}, sizeof(AlignedArray<T, N>)); \1"
TEXTS = {
    "tile/pack.h": [
        (
            r"(const auto raw = \*reinterpret_cast<const AlignedArray<T, N>\*>\(from\);)",
            ALIGNED.format("from"),
        ),
        (r"(\*reinterpret_cast<AlignedArray<T, N>\*>\(to\) = raw;)", ALIGNED.format("to")),
    ],
    # Lane 0 may send a slot, which comes round again before another lane has seen this phase of its barrier.
    "delta_product/scan_state_warps.cuh": [
        tuple(x.format("u", "add_inverse_product", "z") for x in (START, STARTED))
    ],
    "delta_product/reverse_state_warps.cuh": [
        tuple(x.format("g", "add_transposed_inverse_product", "du") for x in (START, STARTED))
    ],
    # Sequences are cut where they are short already, and a test says how large the card is.
    "tile/segments.h": [
        (r"constexpr int64_t kMultiprocessors = 132;", "inline int64_t kMultiprocessors = 132;"),
        (r"kMinChunks = 16;", "kMinChunks = 2;"),
    ],
    "delta_product/prepare_loads.cuh": [
        (
            r"asm volatile\(.cp\.async.*?exists \? into \+ size : 0\)\);",
            "emulated::start_copy(shared_address(to), exists ? (const void*)(address - into) : nullptr, 4,\n"
            "                     into + size);",
        ),
    ],
}
# Files of which the part for sm_90 is taken.
FOR_TMA = (
    "tile/tma.h",
    "tile/cluster.h",
    "cat_attention/sm90/storage.cuh",
    "delta_product/scan_fused.cuh",
)
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
    for pattern, text in TEXTS.get(file, []):
        source, count = re.subn(pattern, text, source, flags=re.DOTALL)
        assert count == 1, f"{file} has no {pattern}"
    if file in FOR_TMA:
        source = re.sub("#if __CUDA_ARCH__ >= 900.*", "#if true", source)
    if file == "tile/matrix.h":
        source = source.replace(BEFORE_PAIRS, PAIR + BEFORE_PAIRS)
    source = source.replace(
        "__ushort_as_half(static_cast<unsigned short>(raw.bits))",
        "[&] { uint16_t bits = raw.bits; __half half; memcpy(&half, &bits, 2); return half; }()",
    )
    source = re.sub(
        r"extern __shared__ \w+\(\d+\) (unsigned char|char|float) (\w+)\[\];",
        r"\1* const \2 = reinterpret_cast<\1*>(emulated::current->block->shared);",
        source,
    )
    source = source.replace(
        "SharedAllocator(shared)(", "SharedAllocator{shared}("
    )  # which g++ takes for a declaration
    source = re.sub(
        r"^( +)__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)((?:\[.*?\])+);",
        r"\1auto& \3 = emulated::shared_array<__COUNTER__, \2\4>();",
        source,
        flags=re.MULTILINE,
    )
    source = re.sub(
        r"([\w:<>, ]+?(?:<decltype\(\w+\)>)?)\s*<<<(.*?),\s*stream>>>\((.*?)\);",
        r"emulated::launch([=] { \1(\3); }, \2);",
        source,
        flags=re.DOTALL,
    )
    if file.startswith("cat_attention/sm90/"):
        # Rings that are soon full: who waits for a place, or gives one back too early, is seen.
        source = re.sub(r"kStages = Tile == 64 \? \d : \d", "kStages = 2", source)
    source = re.sub(
        r"\bcuda(GetDevice|OccupancyMaxActiveBlocksPerMultiprocessor)\(", r"emulated::cuda\1(", source
    )
    source = source.replace("cudaGetLastError()", "cudaSuccess")
    header = {"tile/tma.h": "copy_engine.h", "tile/warpgroup.h": "products.h"}.get(file, "emulator.h")
    return source.replace("#pragma once\n", f'#pragma once\n#include "{header}"\n', 1)


def instances(folder: str) -> dict[str, str]:
    """By name the sources that kernels/CMakeLists.txt makes of a folder's instances.txt."""
    table = KERNELS / folder / "instances.txt"
    form = (KERNELS / "instance.cu.in").read_text()
    sources = {}
    for row in table.read_text().splitlines() if table.exists() else ():
        if not row or row.startswith("#"):
            continue
        fields = [column.split() for column in row.split("|")]
        assert len(fields) == 4 and all(fields) and len(fields[0]) == 1, f"{table}: {row}"
        (header,), types, functions, arguments = fields
        calls = [f"{function}<{argument}>" for function in functions for argument in arguments]
        lines = "".join(f"template decltype({call}) {call};\n" for call in calls)
        for type in types:
            source = form.replace("@instances@", lines).replace("@type@", type)
            name = f"instances/{header.removesuffix('.cuh')}_{type}.cu"
            assert name not in sources, f"{table}: {name} is made already: {row}"
            sources[name] = source.replace("@header@", header)
    return sources


def write(folder: Path, operator: str) -> None:
    """An operator's kernels and what they include of tile and pipe."""
    folders = (operator, *ALSO.get(operator, ()))
    sources = [p for of in folders for p in (KERNELS / of).rglob("*") if p.suffix in (".h", ".cuh", ".cu")]
    files = [*BODIES, *TEXTS, *(p.relative_to(KERNELS).as_posix() for p in sources)]
    for file in sorted(set(files)):
        if file.startswith(("tile/", "pipe/", *(f"{of}/" for of in folders))):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(rewritten(file))
    for name, source in (pair for of in folders for pair in instances(of).items()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source)
