"""The attention of CAT."""

import torch
from torch import Tensor


def cat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunk: int,
    scale: float | None = None,
    cu_chunks: Tensor | None = None,
) -> Tensor:
    """The attention of CAT (compress and attend): T (K + chunk) / 2 scores for K chunks instead of T^2 / 2.

    Row 0 of every chunk of ``chunk`` rows (2 to 256) is its header. A row attends to the headers of
    earlier chunks and to the rows of its own chunk up to itself, which include its header. A header attends
    to headers only. T need not be a multiple of ``chunk``.

    Shapes: q ``[B, T, HQ, D]``, k ``[B, T, H, D]``, v ``[B, T, H, V]``; o ``[B, T, HQ, V]``. ``scale``
    defaults to ``D**-0.5``. ``cu_chunks [N + 1]`` (int32 or int64, on the device) packs N sequences of whole
    chunks into ``B == 1`` and counts chunks; rows of no sequence return 0. There is no state: a decoding
    step is attention over the headers and the current chunk's rows.

    >>> q = k = v = torch.randn(2, 100, 4, 64)
    >>> cat_attention(q, k, v, chunk=16).shape
    torch.Size([2, 100, 4, 64])
    """
    return torch.ops.girih.cat_attention(q, k, v, cu_chunks, chunk=chunk, scale=scale)
