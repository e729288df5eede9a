"""What hypothesis draws for a call beside what a property is about."""

from cases import SIZES
from hypothesis import strategies as st

WIDTHS = st.sampled_from([1, 2, 3, 4, 5, 8, 16, 17])


@st.composite
def sizes(draw, case):
    """Batch, heads, queries a head and widths, as keywords of `Case.draw`."""
    heads = draw(st.integers(1, 3))
    drawn = {"B": draw(st.integers(1, 3)), "H": heads, "Q": heads * draw(st.integers(1, 3))}
    drawn |= {letter: draw(WIDTHS) for letter in "DVMX"}
    if case.sizes.get("V") == SIZES["D"]:  # step sizes of every channel: the memory is square
        drawn["V"] = drawn["D"]
    if case.op == "lattice":  # a unit column of one entry has nowhere to move, and of few it swings about:
        drawn["D"] = max(4, drawn["D"])  # what is left of a difference is rounding
    return drawn
