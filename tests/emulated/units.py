"""The kernel sources that the emulated tests compile in addition to tests/emulated/OPERATOR*.cpp."""

import os
from pathlib import Path

EMULATED = Path(__file__).resolve().parent
# mutations.py sets GIRIH_KERNELS to a copy of kernels/ with a mistake.
KERNELS = Path(os.environ.get("GIRIH_KERNELS") or EMULATED.parents[1] / "kernels")
# EMULATED is first, so that its tile/ptx.h and tile/cuts.h replace the headers of kernels/.
INCLUDE_PATH = (EMULATED, KERNELS)
HALVES = ("__half", "__nv_bfloat16")
FP32 = tuple(f"fp32/{name}.cu" for name in ("scan", "key_read", "value_read", "gate_gradient"))
# For each operator, patterns of files in kernels/ or of instances. All files of a pattern are compiled as one
# translation unit.
UNITS = {
    "cat_attention": (
        "cat_attention/cat_attention.cu",
        *(f"instances/cat_attention/**/*_{type}.cu" for type in ("float", *HALVES)),
    ),
    "delta_product": (
        *(f"delta_product/fp32_{name}.cu" for name in ("rows", "scan", "gradients")),
        "delta_product/channel_beta_rows.cu",
        "delta_product/*plan.cu",
        *(f"instances/delta_product/channel_beta_gradients_{type}.cu" for type in HALVES),
    ),
    "skinny_gemm": ("skinny_gemm/skinny_gemm.cu",),
    "gla": (
        *(f"instances/{prefix}{type}.cu" for prefix in ("gla/*", "gsa/dkv_") for type in HALVES),
        *("gla/step.cu", "gla/[gh]*.cu", "gsa/fits.cu", "gsa/[js]*n.cu", "gla/fp32_plan.cu", *FP32),
    ),
    "lattice": (
        *(f"lattice/{name}.cu" for name in ("lattice", "fits", "fp32_scan", "fp32_backward", "step")),
        *(f"instances/lattice/{name}_{HALVES[1]}.cu" for name in ("scan*", "read*", "reverse*", "dkv")),
    ),
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
        *(f"instances/trellis/*{type}.cu" for type in HALVES),
        *(f"trellis/{name}.cu" for name in ("plan", "trellis", "fits", "gates", "step")),
        *(f"trellis/fp32_{name}.cu" for name in ("plan", "scan", "read_map", "reverse", "dkv")),
        *(f"fp32/{name}.cu" for name in ("key_read", "value_read")),
    ),
}


def instances(table: Path) -> dict[str, str]:
    """The sources that kernels/CMakeLists.txt generates from an instances.txt, by file name."""
    template = (KERNELS / "instance.cu.in").read_text()
    sources = {}
    for row in table.read_text().splitlines():
        if not row or row.startswith("#"):
            continue
        fields = [column.split() for column in row.split("|")]
        assert len(fields) == 4 and all(fields) and len(fields[0]) == 1, f"{table}: {row}"
        (header,), types, functions, arguments = fields
        calls = [f"{function}<{argument}>" for function in functions for argument in arguments]
        lines = "".join(f"template decltype({call}) {call};\n" for call in calls)
        for type in types:
            source = template.replace("@instances@", lines).replace("@type@", type)
            name = f"instances/{header.removesuffix('.cuh')}_{type}.cu"
            assert name not in sources, f"{table}: {name} is already defined: {row}"
            sources[name] = source.replace("@header@", header)
    return sources


def units(operator: str, folder: Path) -> list[list[Path]]:
    """The files of each translation unit of an operator. Writes the instances to `folder`."""
    for table in KERNELS.glob("*/instances.txt"):
        for name, source in instances(table).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(source)
    sources = []
    for pattern in UNITS.get(operator, ()):
        root = folder if pattern.startswith("instances/") else KERNELS
        sources.append(sorted(root.glob(pattern)))
        assert sources[-1], f"no file matches {pattern}"
    return sources
