"""Calls of gsa and gla on the emulator (tests/emulated/gated.h): tensors, gates and comparisons."""

import ctypes

import kernel_accuracy
import torch
from emulated import NUMBER, POINTER, Array, guarded_copy, guarded_nan, round_up_8

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEATURES = ["softmax", "none", "silu", "relu", "relu2"]

GATED = (
    (NUMBER, "batch tokens sequences"),
    (POINTER, "cu_seqlens"),
    (NUMBER, "rows heads query_heads D V M slots feature"),
    (ctypes.c_double, "scale"),
    (NUMBER, "use_fp32 shared processors"),
    (Array, "q k v s g dout"),
    (Array * 2, "initial last dlast dinitial"),
    (Array, "o dq dk dv ds dg"),
)


def gates(pattern, shape, generator):
    """Log gates. "strong": random from 0 to -20, most of them near 0. "leaping": +2 at one of every 16 tokens
    and -0.5 at the others, with random positions for every slot. Other patterns: kernel_accuracy.gates().
    """
    if pattern == "strong":
        return -20 * torch.rand(shape, generator=generator) ** 4
    if pattern == "leaping":
        token = torch.arange(shape[1]).view(-1, *[1] * len(shape[2:]))
        leaps = (token + torch.randint(16, shape[2:], generator=generator)) % 16 == 0
        return torch.where(leaps, 2.0, -0.5).repeat(shape[0], *[1] * len(shape[1:]))
    return kernel_accuracy.gates(pattern, shape, generator)


class Layout:
    """Positions of sequences: full batch rows (None), a packed row ("packed") or ranges of rows ("rows")."""

    def __init__(self, lengths, packing):
        self.lengths, self.N = lengths, len(lengths)
        self.packed, self.cu_seqlens = packing == "packed", None
        if self.packed:
            self.B, self.T = 1, sum(lengths) + 5
            self.starts = [2 + sum(lengths[:i]) for i in range(self.N)]
            self.cu_seqlens = guarded_copy(torch.tensor([*self.starts, 2 + sum(lengths)]))
        elif packing == "rows":
            self.B, self.T = self.N, max(lengths) + 3
            self.starts = [n % 3 for n in range(self.N)]
            ends = [[s, s + n] for s, n in zip(self.starts, lengths, strict=True)]
            self.cu_seqlens = guarded_copy(torch.tensor(ends))
        else:
            self.B, self.T, self.starts = self.N, lengths[0], [0] * self.N
        self.owned = torch.zeros(self.B, self.T, dtype=torch.bool)
        for n in range(self.N):
            self.owned[self.index(n)] = True

    def index(self, n):
        """The index of the tokens of sequence n in a tensor [B, T, ...]; the result is [1, length, ...]."""
        row = 0 if self.packed else n
        return slice(row, row + 1), slice(self.starts[n], self.starts[n] + self.lengths[n])

    def fill(self, call):
        call.batch, call.tokens, call.sequences = self.B, self.T, self.N
        call.cu_seqlens = None if self.cu_seqlens is None else self.cu_seqlens.data_ptr()
        call.rows = self.cu_seqlens is not None and not self.packed

    def assert_rest_unwritten(self, name, x):
        """In an output of padded_rows(), tokens outside sequences and gaps between rows are not written."""
        rest = x._base.clone()
        rest[self.owned] = rest[self.owned].index_fill(-1, torch.arange(x.shape[-1]), torch.nan)
        assert rest.isnan().all(), f"{name} has a write outside its rows"


def state(N, H, width, M, values=None):
    """A memory in the layout of the kernels, [N, heads, width, M]: a copy of `values` padded with zeros, or
    all NaN."""
    padded = guarded_nan(N, H, round_up_8(width), round_up_8(M))
    if values is not None:
        padded.zero_()[:, :, :width, :M] = values
    return padded


def with_gaps(x, dtype=FP32, transposed=False):
    """x in a layout that a step accepts: NaN between its rows or, if transposed, between its columns."""
    if transposed:
        return with_gaps(x.mT, dtype).mT
    padded = guarded_nan(*x.shape[:-1], x.shape[-1] + 4, dtype=dtype)
    padded[..., : x.shape[-1]] = x
    return padded[..., : x.shape[-1]]


def assert_gaps_unwritten(x):
    """A tensor of with_gaps() is written completely, and its gaps are not written."""
    base = x._base
    assert base.isnan().sum() == base.numel() - x.numel(), "a step writes outside its rows"


# Allowed relative errors of a whole tensor and of a row.
ALLOWED = {BF16: (0.008, 0.015), FP16: (0.001, 0.002), FP32: (1e-5, 2e-5)}


def assert_close_by_rows(got, want, dtype, kinks=False):
    """Relative errors of every tensor and of its rows; the error of a row is relative to its norm plus the
    mean norm of the rows. The gradients of gates are sums that cancel and have twice the tolerance. With
    kinks, a few entries have the gradient of the other side.
    """
    assert got.keys() == want.keys()
    for name, expected in want.items():
        most, most_of_row = ALLOWED[dtype]
        if name == "dg":
            most, most_of_row = 2 * most, 2 * most_of_row
        if kinks and name.startswith("d") and dtype != FP32:
            most, most_of_row = 0.06, 0.3
        if not expected.numel():
            continue
        error = got[name].double() - expected
        assert not error.isnan().any(), f"{name} has NaN"
        tensor_error = error.norm() / expected.norm().clamp_min(1e-2)
        size = expected.norm(dim=-1) + expected.norm(dim=-1).mean().clamp_min(1e-2)
        row_error = (error.norm(dim=-1) / size).max()
        assert tensor_error < most, f"{name}: off by {tensor_error:.3%}"
        assert row_error < most_of_row, f"{name}: a row is off by {row_error:.3%}"
