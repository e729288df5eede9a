"""Hypothesis strategies for sizes, and token sequences with repetitions."""

import torch
from cases import SIZES
from hypothesis import strategies as st

WIDTHS = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17])

# x [B, T, H, width] -> the same shape with repeated tokens.
STRUCTURES = {
    "repeated": lambda x: x[:, :1].expand_as(x),
    "alternating": lambda x: x[:, :1] * (1 - 2 * (torch.arange(x.shape[1]) % 2))[:, None, None],
    "half repeated": lambda x: torch.where(torch.arange(x.shape[1])[:, None, None] % 2 == 0, x[:, :1], x),
    "runs": lambda x: x[:, torch.arange(x.shape[1]) // 7],
}


@st.composite
def sizes(draw, case):
    """Batch, heads, queries per head and widths, as keywords of `Case.draw`."""
    heads = draw(st.integers(1, 3))
    drawn = {"B": draw(st.integers(1, 3)), "H": heads, "Q": heads * draw(st.integers(1, 3))}
    drawn |= {letter: draw(WIDTHS) for letter in "DVMX"}
    if case.sizes.get("V") == SIZES["D"]:  # per-channel step sizes require a square memory
        drawn["V"] = drawn["D"]
    if case.op == "lattice":  # results of short unit columns are dominated by rounding
        drawn["D"] = max(4, drawn["D"])
    return drawn
