"""The least a shape can take: bytes that must move at the card's copy rate, or products at its peak."""

import math


def size(x):
    """Bytes of a tensor, or of all in a tuple."""
    if x is None:
        return 0
    return sum(map(size, x)) if isinstance(x, tuple) else x.numel() * x.element_size()


def flops(shape):
    """Of the recurrence's own products, forward: what no chunk form can leave out.

    gsa: two memories, each written and read once a token. gla: one. delta_product: n reads and writes and the
    output's read. trellis: two memories, each read for the step, written, read for the output. lattice: the
    memory against k, against h, the write and the read. cat_attention: scores and values of the pairs seen.
    """
    at = shape.sizes
    if shape.op == "short_conv":
        return 2 * at["B"] * at["T"] * at["X"] * at["W"]
    if shape.op == "gated_rms_norm":
        return 8 * math.prod(at[letter] for letter in shape.case.data["x"][0])
    D, V, M = at["D"], at["V"], at.get("M", 0)
    C = shape.case.chunk
    per_token = {
        "gsa": 4 * M * (D + V),
        "gla": 4 * D * V,
        "delta_product": (4 * at["n"] + 2) * D * V,
        "trellis": 6 * M * (D + V),
        "lattice": 8 * D * M,
        "cat_attention": (at["T"] / C + C) * (D + V),
    }
    return at["B"] * at["T"] * at["H"] * per_token[shape.op]


def milliseconds(shape, keywords, o, rates):
    """{measure: ms}. Backward reads the inputs again and the output's gradient and writes every gradient; its
    products are twice the forward's, in attention, which keeps no scores, two and a half times.

    rates: bytes and FLOPs a second.
    """
    inputs = sum(size(x) for x in keywords.values() if not isinstance(x, (str, int, float, bool)))
    products = flops(shape)
    if shape.is_step:  # the state is among the inputs, read and written
        moved = {"step": inputs + size(keywords["state"]) + size(o)}
        done = {"step": products}
    else:
        both = 3.5 if shape.op == "cat_attention" else 3
        moved = {"forward": inputs + size(o), "forward_backward": 3 * inputs + 2 * size(o)}
        done = {"forward": products, "forward_backward": both * products}
    return {name: 1e3 * max(moved[name] / rates["bytes"], done[name] / rates["flops"]) for name in moved}
