"""The least a shape can take: bytes that must move at the card's copy rate, or products at its peak."""

from shapes import flops


def size(x):
    """Bytes of a tensor, or of all in a tuple."""
    if x is None:
        return 0
    return sum(map(size, x)) if isinstance(x, tuple) else x.numel() * x.element_size()


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
