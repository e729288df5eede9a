"""Compiles kernel sources for the CPU (tests/emulated) and passes tensors to them."""

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


# Maximum bytes of shared memory per block on sm_90, sm_80 and sm_86.
SHARED, SHARED_80, SHARED_86 = 232448, 166912, 101376

LIBC = ctypes.CDLL(None)
NUMBER, POINTER = ctypes.c_int64, ctypes.c_void_p


def structure(*fields):
    """A ctypes structure with the fields of a C++ struct: (type, names separated by spaces), in order."""
    members = [(name, type_) for type_, names in fields for name in names.split()]
    return type("Call", (ctypes.Structure,), {"_fields_": members})


def compile_to(library, folder, operator):
    command = [
        "g++",
        "-std=c++20",
        "-Og",
        "-fPIC",
        "-fno-gnu-unique",  # every library has its own inline variables
        "-fsanitize=bounds-strict,alignment",
        "-fsanitize-undefined-trap-on-error",
        *(f"-I{path}" for path in (*units.INCLUDE_PATH, HEADERS[0].parent, folder)),
        *("-include", "emulator.h"),
    ]
    objects = {path: folder / f"{path.stem}.o" for path in EMULATED.glob(f"{operator}*.cpp")}
    for number, files in enumerate(units.units(operator, folder)):
        unit = folder / f"unit_{number}.cpp"
        unit.write_text("".join(f'#include "{path}"\n' for path in files))
        objects[unit] = unit.with_suffix(".o")
    commands = [[*command, "-c", path, "-o", target] for path, target in objects.items()]
    with ThreadPool() as compilers:
        compilers.map(partial(subprocess.run, check=True), commands, chunksize=1)
    subprocess.run(["g++", "-shared", *objects.values(), "-o", library], check=True)


def build_library(folder, operator, sizes=("chunks",), headers=None):
    """Compiles the kernels of an operator and loads the library. `sizes`: functions that return an int64.
    `headers`: further headers that the sources include, by name."""
    library = folder / f"{operator}.so"
    if not library.exists():
        for name, text in (headers or {}).items():
            (folder / name).write_text(text)
        compile_to(library, folder, operator)
    loaded = ctypes.CDLL(str(library))
    for name in sizes:
        getattr(loaded, name).restype = ctypes.c_int64
    return loaded


def load_kernels(factory, operator, **options):
    """build_library() in a folder of a pytest tmp_path_factory, built once for all xdist workers."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"emulated_{operator}"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return build_library(folder, operator, **options)


def round_up_8(n):
    return (n + 7) // 8 * 8


def guarded_nan(*shape, dtype=torch.float32):
    """A tensor filled with NaN (integers: -1) that ends at a protected page: any access beyond it ends the
    test."""
    used = math.prod(shape) * dtype.itemsize
    page_bytes = -(-max(used, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, page_bytes + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    bits = torch.frombuffer(memory, dtype=torch.uint8)
    bits[:page_bytes] = 0xFF
    if LIBC.mprotect(ctypes.c_void_p(bits.data_ptr() + page_bytes), ctypes.c_size_t(mmap.PAGESIZE), 0) != 0:
        raise MemoryError("mprotect failed")
    begin = (page_bytes - used) // dtype.itemsize
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return torch.empty(0, dtype=dtype).set_(bits.untyped_storage(), begin, shape, strides)


def guarded_copy(x):
    """A copy of x that ends at a protected page, as guarded_nan()."""
    return None if x is None else guarded_nan(*x.shape, dtype=x.dtype).copy_(x)


def nan_padded_copy(x):
    """A copy of x with NaN on every side in memory."""
    if x is None:
        return None
    padded = guarded_nan(*[size + 2 for size in x.shape], dtype=x.dtype)
    return padded[tuple(slice(1, -1) for _ in x.shape)].copy_(x)


def assert_padding_unwritten(name, x):
    """The NaN around x are unchanged."""
    around = x._base.clone()
    around[tuple(slice(1, -1) for _ in x.shape)] = torch.nan
    assert around.isnan().all(), f"{name}: a write outside the tensor"


def assert_near(name, got, want, most):
    # Terms of size 1 can cancel and leave only rounding errors, so the norm has a minimum.
    error = (got.double() - want).norm() / want.norm().clamp_min(0.1 * max(want.numel(), 1) ** 0.5)
    assert error <= most, f"{name}: off by {error:.2g}"


def padded_rows(*shape, values=None, dtype=torch.bfloat16):
    """[..., width rounded up to 8] with NaN between the rows: a copy of `values` padded with zeros, or all
    NaN."""
    padded = guarded_nan(*shape[:-1], round_up_8(shape[-1]) + 8, dtype=dtype)
    view = padded[..., : round_up_8(shape[-1])]
    if values is not None:
        view.zero_()[..., : shape[-1]] = values
    return view


def assert_rest_unwritten(name, x, tokens):
    """In a tensor of padded_rows() or guarded_nan(), only the columns of these tokens are written."""
    rest = (x if x._base is None else x._base).clone()
    rest[:, tokens, ..., : x.shape[-1]] = torch.nan
    assert rest.isnan().all(), f"{name} has a write outside its rows"


def assert_close(got, want, most=0.02):
    """Relative error in the Frobenius norm; 16-bit errors accumulate over the chunks of a short sequence."""
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = (got[name].double() - expected).norm() / expected.norm().clamp_min(1e-9)
        assert error < most, f"{name}: off by {error:.1%}"
