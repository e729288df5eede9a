"""The residual block around a mixer."""

from typing import Any

from torch import Tensor, nn

from girih.nn.functional.fused import residual_norm
from girih.nn.functional.step import Product, RowInput, products
from girih.nn.layers.norm import RMSNorm
from girih.nn.layers.swiglu import SwiGLU


class Block(nn.Module):
    """The Llama block: `x + mixer(RMSNorm(x))`, then `x + SwiGLU(RMSNorm(x))`.

    Arguments and results are those of the mixer. With `intermediate_size=None` there is no SwiGLU, as in
    Mamba-2.

    >>> from girih.nn import Attention
    >>> block = Block(Attention(64, num_heads=2), hidden_size=64, intermediate_size=160)
    >>> block(torch.randn(3, 10, 64))[0].shape
    torch.Size([3, 10, 64])
    """

    def __init__(
        self, mixer: nn.Module, hidden_size: int, intermediate_size: int | None, norm_eps: float = 1e-6
    ):
        super().__init__()
        self.mixer_norm = RMSNorm(hidden_size, norm_eps)
        self.mixer = mixer
        self.mlp_norm = None if intermediate_size is None else RMSNorm(hidden_size, norm_eps)
        self.mlp = None if intermediate_size is None else SwiGLU(hidden_size, intermediate_size)

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        _, x, y, state = self.parts(x, None, attention_mask, state, use_cache, cu_seqlens)
        return x + y, state

    def parts(
        self,
        x: Tensor,
        branch: Tensor | None,
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """`forward` of x + branch without its last sum: the norm of the next block adds the two terms.

        branch: the second term of the previous block; None: 0. Returns (x + branch, first term, second term,
        state); the output of the block is the sum of the terms.
        """
        total, normed = residual_norm(self.mixer_norm, x, branch)
        y, state = self.mixer(normed, attention_mask, state, use_cache, cu_seqlens)
        if self.mlp is None:
            return total, total, y, state
        x, normed = residual_norm(self.mlp_norm, total, y)
        return total, x, self.mlp(normed), state

    def step(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        state: Any = None,
        use_cache: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """`forward` for few rows, computed from the weights by `products`: no module is called, so hooks do
        not run. Norms, activations and sums are fused with the products. Calls `forward` if a module is not
        known (`has_known_modules`)."""
        if not self.has_known_modules():
            return self(x, attention_mask, state, use_cache, cu_seqlens)
        mixer, mlp = self.mixer, self.mlp
        specs = mixer.products()
        if specs is None or attention_mask is not None:
            y, state = mixer(self.mixer_norm(x), attention_mask, state, use_cache, cu_seqlens)
            x = x + y
        else:
            projected = products(x, specs, norm_prologue(self.mixer_norm))
            y, state = mixer.core(projected, state, use_cache, cu_seqlens)
            (x,) = products(y, [Product(mixer.o_proj.weight)], mixer.output_prologue(), residual=x)
        if mlp is None:
            return x, state
        gate, up = products(
            x, [Product(mlp.gate_proj.weight), Product(mlp.up_proj.weight)], norm_prologue(self.mlp_norm)
        )
        (x,) = products(gate, [Product(mlp.down_proj.weight)], RowInput("silu_product", up), residual=x)
        return x, state

    def has_known_modules(self) -> bool:
        """Whether all modules are classes of this package or linear layers without bias."""
        return type(self.mlp) in (SwiGLU, type(None)) and all(
            type(m).__module__.startswith("girih.")
            or type(m) is nn.Sequential
            or (type(m) is nn.Linear and m.bias is None)
            for m in self.modules()
        )


def norm_prologue(norm: RMSNorm) -> RowInput:
    return RowInput("rms_norm", norm.weight, norm.eps)
