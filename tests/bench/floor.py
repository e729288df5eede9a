"""Lower bound of the time of a shape: its bytes at the card's copy rate, or its products at the peak rate."""

from shapes import flops


def size(x):
    """Bytes of a tensor, or of all tensors of a tuple."""
    if x is None:
        return 0
    return sum(map(size, x)) if isinstance(x, tuple) else x.numel() * x.element_size()


def milliseconds(shape, keywords, o, rates):
    """{measure: ms}. Backward reads the inputs again, reads the gradient of the output, and writes all
    gradients. Backward has twice the products of forward. In attention, which stores no scores, it has two
    and a half times as many.

    rates: bytes and FLOPs a second.
    """
    inputs = sum(size(x) for x in keywords.values() if not isinstance(x, (str, int, float, bool)))
    products = flops(shape)
    if shape.is_step:  # the state is one of the inputs, and is read and written
        num_bytes = {"step": inputs + size(keywords["state"]) + size(o)}
        num_products = {"step": products}
    else:
        factor = 3.5 if shape.op == "cat_attention" else 3
        num_bytes = {"forward": inputs + size(o), "forward_backward": 3 * inputs + 2 * size(o)}
        num_products = {"forward": products, "forward_backward": factor * products}
    return {
        name: 1e3 * max(num_bytes[name] / rates["bytes"], num_products[name] / rates["flops"])
        for name in num_bytes
    }
