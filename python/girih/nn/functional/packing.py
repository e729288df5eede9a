"""Bounds of sequences packed into one row, from the arguments that collators produce."""

import torch
from torch import Tensor

from girih.nn.functional.state import check_batch, current_pieces


def check_packing(x: Tensor, cu_seqlens: Tensor | None) -> None:
    """Raises unless cu_seqlens is None, or `[N + 1]` with x `[1, T, ...]`."""
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or x.shape[0] != 1):
        raise ValueError(
            f"cu_seqlens has shape {list(cu_seqlens.shape)} and x has {x.shape[0]} rows; "
            "expected [N + 1] and one row, which packs N sequences"
        )


def resolve_cu_seqlens(
    x: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor | None,
    cu_seq_lens_q: Tensor | None,
    seq_idx: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """`cu_seqlens [N + 1]` of the sequences in x `[1, T, ...]`; None if each row of x `[B, T, ...]` is one
    sequence.

    cu_seqlens and cu_seq_lens_q are returned as they are. Otherwise a new sequence starts where seq_idx
    changes, or where position_ids, which rise by one, restart. The host reads the number of sequences, so
    seq_idx and position_ids wait for the device and break the graph of `torch.compile`. attention_mask
    `[B, T]`: positions of masked tokens are ignored.
    """
    if cu_seqlens is not None and cu_seq_lens_q is not None:
        raise ValueError("cu_seqlens and cu_seq_lens_q: give one, both are the bounds of packed sequences")
    if cu_seq_lens_q is not None:
        cu_seqlens = cu_seq_lens_q
    name, index = ("position_ids", position_ids) if seq_idx is None else ("seq_idx", seq_idx)
    (rows, T), changed = x.shape[:2], None
    if index is not None and index.shape not in ((rows, T), (1, T)):
        raise ValueError(f"{name} has shape {list(index.shape)}; expected [B, T] = {[rows, T]}")
    if cu_seqlens is None and index is not None and T > 1:
        step = index.diff() if seq_idx is None else 1 - index.diff().abs()
        if attention_mask is not None:
            step = step.where(attention_mask[:, 1:] & attention_mask[:, :-1], 1)
        step = step.cpu()
        if (step > 1).any():
            raise ValueError("position_ids: expected to rise by one within a sequence, and not by more")
        changed = step < 1
    if changed is not None and changed.any():
        if attention_mask is not None or rows > 1:
            raise ValueError(
                f"{name} starts new sequences within a row; expected one row, [1, T], and no attention_mask: "
                "packed sequences have no padding"
            )
        starts = changed[0].nonzero().flatten() + 1
        cu_seqlens = cu_seqlens_from_starts(starts, T).to(x.device)
    check_packing(x, cu_seqlens)
    return cu_seqlens


def cu_seqlens_from_starts(starts: Tensor, tokens: int) -> Tensor:
    """`cu_seqlens [N + 1]` int32 from the first tokens of all sequences except the first, `[N - 1]`."""
    return torch.cat((starts.new_zeros(1), starts, starts.new_full((1,), tokens))).int()


def sequence_of_token(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Index of the packed sequence of each token, `[T]` int64."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens, token, right=True) - 1


def count_sequences(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """Number of sequences of x `[B, T, ...]`: N for cu_seqlens `[N + 1]`, else B."""
    is_packed = cu_seqlens is not None and cu_seqlens.dim() == 1
    return cu_seqlens.shape[0] - 1 if is_packed else x.shape[0]


def token_positions(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Position of each token in its sequence, `[B, T]`, and length of each sequence after x, `[N]`.

    x `[B, T, ...]`. before: lengths of the sequences before x, `[N]` int64; None: 0. cu_seqlens: `[N + 1]`,
    or `[B, 2]` with the first and last + 1 valid token of each row, or None.
    """
    T = x.shape[1]
    token = torch.arange(T, device=x.device)
    is_packed = cu_seqlens is not None and cu_seqlens.dim() == 1
    count = count_sequences(x, cu_seqlens)
    if before is None and (pieces := current_pieces.get()) is not None:
        before = pieces.tokens_before(x, cu_seqlens)
    if before is None:
        before = torch.zeros(count, dtype=torch.long, device=x.device)
    else:
        check_batch(before, count)
    if cu_seqlens is None:
        return before[:, None] + token, before + T
    first, last = (cu_seqlens[:-1], cu_seqlens[1:]) if is_packed else cu_seqlens.unbind(1)
    shift, after = before - first, before + last - first
    if not is_packed:
        return shift[:, None] + token, after
    sequence = sequence_of_token(cu_seqlens, T).clamp(0, max(count - 1, 0))
    return (shift[sequence] + token)[None], after


def make_seq_idx(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """seq_idx `[1, T]` int32 of packed sequences."""
    return sequence_of_token(cu_seqlens, tokens)[None].int()


def make_position_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """position_ids `[1, T]` of packed sequences."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    return (token - cu_seqlens[sequence_of_token(cu_seqlens, tokens)])[None].long()
