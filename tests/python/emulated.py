"""Kernels' sources compiled for the CPU (tests/emulated), and tensors handed to them."""

import ctypes
import fcntl
import importlib.util
import os
import subprocess
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

EMULATED = Path(__file__).parents[1] / "emulated"
spec = importlib.util.spec_from_file_location("rewrite", EMULATED / "rewrite.py")
rewrite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rewrite)

HEADERS = [p for p in (Path(torch.__file__).parents[1] / "nvidia").glob("*/include/cuda_bf16.h")]
HEADERS += list(Path("/usr/local/cuda/include").glob("cuda_bf16.h"))
needs_headers = pytest.mark.skipif(not HEADERS, reason="needs the headers of CUDA")

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}


class Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("stride", ctypes.c_int64 * 4)]

    @classmethod
    def of(cls, x):
        if x is None:
            return cls()
        stride = (ctypes.c_int64 * 4)(*x.stride(), *[0] * (4 - x.dim()))
        return cls(x.data_ptr(), DTYPES[x.dtype], stride)


NUMBER, POINTER = ctypes.c_int64, ctypes.c_void_p


def structure(*fields):
    """The Call of an operator's file: (kind of a field, names) in its order."""
    members = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Call", (ctypes.Structure,), {"_fields_": members})


def compile_to(library, folder, operator):
    rewrite.write(folder, operator)
    paths = [folder, EMULATED, rewrite.KERNELS, HEADERS[0].parent]
    command = ["g++", "-std=c++20", "-Og", "-fPIC", *(f"-I{path}" for path in paths)]
    parts = {path: folder / f"{path.stem}.o" for path in EMULATED.glob(f"{operator}*.cpp")}
    for number, pattern in enumerate(rewrite.UNITS.get(operator, ())):
        unit = folder / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in sorted(folder.glob(pattern))))
        parts[unit] = unit.with_suffix(".o")
    commands = [[*command, "-c", path, "-o", part] for path, part in parts.items()]
    with ThreadPool() as compilers:
        compilers.map(partial(subprocess.run, check=True), commands, chunksize=1)
    subprocess.run(["g++", "-shared", *parts.values(), "-o", library], check=True)


def compiled(folder, operator, sizes=("chunks",)):
    """The operator's kernels as a library, of sources whose names begin with its name; `sizes`: its functions
    that give a number.
    """
    library = folder / f"{operator}.so"
    if not library.exists():
        compile_to(library, folder, operator)
    loaded = ctypes.CDLL(str(library))
    for name in sizes:
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def compiled_once(factory, operator, **how):
    """As compiled(), of a pytest factory of folders: by the first of the processes that share its root."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"emulated_{operator}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return compiled(folder, operator, **how)


def eights(n):
    return (n + 7) // 8 * 8


def rows(*shape, of=None, dtype=torch.bfloat16):
    """[..., width] in packs of 8, NaN between the rows: `of` and zeros, or to be written."""
    padded = torch.full([*shape[:-1], eights(shape[-1]) + 8], torch.nan, dtype=dtype)
    view = padded[..., : eights(shape[-1])]
    if of is not None:
        view.zero_()[..., : shape[-1]] = of
    return view


def assert_close(got, want, most=0.02):
    """In 16 bits, with errors that add up over the chunks of a short sequence."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = (got[name].double() - expected).norm() / expected.norm().clamp_min(1e-9)
        assert error < most, f"{name}: off by {error:.1%}"
