"""Rotary positions of q and k. On a GPU one kernel, in training and in captured decoding steps."""

import torch
from torch import Tensor

from girih.nn.functional.fused import PACK, has_fused_kernel
from girih.nn.functional.step import use_weights_only

MAX_HEAD_DIM = 256  # largest head_dim of the kernel


def rotary_frequencies(head_dim: int, theta: float, angle_dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rotary frequencies theta^(-2i/D), `[D/2]`."""
    half = head_dim // 2
    return theta ** (torch.arange(half, device=device, dtype=angle_dtype) / -half)


def rotary_cos_sin(
    position: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/D), `[..., D/2]`, computed in fp32 (fp64 for fp64) and rounded to
    dtype."""
    angle_dtype = torch.promote_types(dtype, torch.float32)
    angle = position[..., None] * rotary_frequencies(head_dim, theta, angle_dtype, position.device)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotary_factors(
    position: Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Two factors `[..., D]`: rotary(x, position) = x * factors[0] + x.roll(D / 2) * factors[1]."""
    cos, sin = rotary_cos_sin(position, head_dim, theta, dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_row(
    qkv: Tensor, heads: tuple[int, int, int], factors: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv `[N, 1, sum of heads, D]` -> q and k rotated by `rotary_factors`, which broadcast with q and k, and
    v."""
    cos, sin = factors
    qk, v = qkv.split((heads[0] + heads[1], heads[2]), 2)
    q, k = torch.addcmul(qk * cos, qk.roll(qk.shape[-1] // 2, -1), sin).split(heads[:2], 2)
    return q, k, v


def rotary(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """x `[B, T, H, D]` with the pairs (i, i + D/2) rotated by position * theta^(-2i/D).

    position is `[T]` or `[B, T]`, D even. The result has x's dtype.
    """
    cos, sin = (part[..., None, :] for part in rotary_cos_sin(position, x.shape[-1], theta, x.dtype))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


def split_and_rotate(
    qkv: Tensor, heads: tuple[int, int, int], position: Tensor, theta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv `[B, T, sum of heads, D]` -> q and k rotated by `rotary`, and v."""
    if (
        has_fused_kernel(qkv, needs_contiguous=False)
        and (torch.is_grad_enabled() or use_weights_only.get())
        and qkv.shape[-1] % (2 * PACK) == 0
        and qkv.shape[-1] <= MAX_HEAD_DIM
        and qkv.shape[0] * qkv.shape[1] < 2**31
    ):
        frequencies = rotary_frequencies(qkv.shape[-1], theta, torch.float32, qkv.device)
        return torch.ops.girih.rotary(qkv, heads[0], position, frequencies)
    q, k, v = qkv.split(heads, 2)
    return rotary(q, position, theta), rotary(k, position, theta), v
