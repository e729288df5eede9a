"""Inputs surrounded by NaN, to detect reads and writes outside the tensors."""

import torch


class Padded:
    """Creates views into larger buffers full of NaN.

    padding: elements around every dimension, or only around the `outer` outermost; with 1 the view is
    contiguous. order: of the dimensions in memory, from outermost to innermost.
    """

    def __init__(self, padding, order, outer=None, device="cuda"):
        self.padding, self.order, self.outer = padding, order, outer
        self.device, self.views = device, []

    def __call__(self, values):
        if values is None:
            return None
        order = [d for d in self.order if d < values.dim()]
        outer = len(order) if self.outer is None else self.outer
        margins = [self.padding if i < outer else 0 for i in range(len(order))]
        sizes = [values.shape[d] + 2 * n for d, n in zip(order, margins, strict=True)]
        buffer = torch.full(sizes, torch.nan, dtype=values.dtype, device=self.device)
        inside = tuple(slice(n, n + values.shape[d]) for d, n in zip(order, margins, strict=True))
        view = buffer[inside].permute([order.index(d) for d in range(values.dim())])
        view.copy_(values)
        self.views.append((buffer, inside, view, values.to(self.device)))
        return view

    def assert_untouched(self, written=()):
        """The padding is still NaN, and every view that is not in `written` is unchanged."""
        for buffer, inside, view, values in self.views:
            outside = torch.ones_like(buffer, dtype=torch.bool)
            outside[inside] = False
            assert buffer[outside].isnan().all()
            if not any(view is x for x in written):
                assert torch.equal(view, values)
