"""Kernels' sources compiled for the CPU (tests/emulated), and tensors handed to them."""

import ctypes
import fcntl
import importlib.util
import math
import mmap
import os
import subprocess
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

EMULATED = Path(__file__).parents[1] / "emulated"
spec = importlib.util.spec_from_file_location("units", EMULATED / "units.py")
units = importlib.util.module_from_spec(spec)
spec.loader.exec_module(units)

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


# Bytes that a block may have, of sm_90, sm_80 and sm_86.
SHARED, SHARED_80, SHARED_86 = 232448, 166912, 101376

LIBC = ctypes.CDLL(None)
NUMBER, POINTER = ctypes.c_int64, ctypes.c_void_p


def structure(*fields):
    """The Call of an operator's file: (kind of a field, names) in its order."""
    members = [(name, kind) for kind, names in fields for name in names.split()]
    return type("Call", (ctypes.Structure,), {"_fields_": members})


def compile_to(library, folder, operator):
    command = [
        "g++",
        "-std=c++20",
        "-Og",
        "-fPIC",
        "-fno-gnu-unique",  # a library's variables are its own
        "-fsanitize=bounds-strict,alignment",
        "-fsanitize-undefined-trap-on-error",
        *(f"-I{path}" for path in (*units.INCLUDE_PATH, HEADERS[0].parent)),
        *("-include", "emulator.h"),
    ]
    parts = {path: folder / f"{path.stem}.o" for path in EMULATED.glob(f"{operator}*.cpp")}
    for number, files in enumerate(units.units(operator, folder)):
        unit = folder / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in files))
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


def unwritten(*shape, dtype=torch.float32):
    """All NaN, or -1, and right behind it a wall: who comes to it ends the test."""
    used = math.prod(shape) * dtype.itemsize
    room = -(-max(used, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bits = torch.frombuffer(memory, dtype=torch.uint8)
    bits[:room] = 0xFF
    if LIBC.mprotect(ctypes.c_void_p(bits.data_ptr() + room), ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise MemoryError("no wall behind a tensor")
    begin = (room - used) // dtype.itemsize
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), begin, shape, strides)


def walled(x):
    """x before a wall, as unwritten()."""
    return None if x is None else unwritten(*x.shape, dtype=x.dtype).copy_(x)


def surrounded(x):
    """x with NaN on every side of it in memory."""
    if x is None:
        return None
    padded = unwritten(*[size + 2 for size in x.shape], dtype=x.dtype)
    return padded[tuple(slice(1, -1) for _ in x.shape)].copy_(x)


def assert_surrounded(name, x):
    """Nothing is written around it."""
    around = x._base.clone()
    around[tuple(slice(1, -1) for _ in x.shape)] = torch.nan
    assert around.isnan().all(), f"written around {name}"


def assert_near(name, got, want, most):
    # Where terms of size 1 cancel, their roundings are left.
    error = (got.double() - want).norm() / want.norm().clamp_min(0.1 * max(want.numel(), 1) ** 0.5)
    assert error <= most, f"{name}: off by {error:.2g}"


def rows(*shape, of=None, dtype=torch.bfloat16):
    """[..., width] in packs of 8, NaN between the rows: `of` and zeros, or to be written."""
    padded = unwritten(*shape[:-1], eights(shape[-1]) + 8, dtype=dtype)
    view = padded[..., : eights(shape[-1])]
    if of is not None:
        view.zero_()[..., : shape[-1]] = of
    return view


def assert_kept(name, x, tokens):
    """Of rows(), or unwritten(), the columns and these tokens are written and no more."""
    rest = (x if x._base is None else x._base).clone()
    rest[:, tokens, ..., : x.shape[-1]] = torch.nan
    assert rest.isnan().all(), f"{name} is written beyond its rows"


def assert_close(got, want, most=0.02):
    """In 16 bits, with errors that add up over the chunks of a short sequence."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = (got[name].double() - expected).norm() / expected.norm().clamp_min(1e-9)
        assert error < most, f"{name}: off by {error:.1%}"
