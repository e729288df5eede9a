"""`ops.ttt` equals TTT-Linear of Sun et al., with inner gradients by autograd in float64."""

import pytest
import torch
from comparison import assert_within
from girih import ops

B, T, H, D = 2, 11, 2, 6


def layer_norm(x, weight, bias, eps=1e-6):
    """A layer norm over the last dimension."""
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias


def ttt_linear(q, k, v, eta, W, weight, bias, batch):
    """Token by token. W [D, D] learns to reconstruct v from k through a residual and a layer norm (eq. 4).
    The gradients of a mini-batch are evaluated at its first W (eq. 6). Token t reads W after its own step."""
    outputs = []
    for t in range(q.shape[0]):
        if t % batch == 0:
            first = W
        reconstruction = k[t] + layer_norm(k[t] @ first.T, weight, bias)
        loss = (reconstruction - v[t]).square().sum() / 2
        (gradient,) = torch.autograd.grad(loss, first, create_graph=True)
        W = W - eta[t] * gradient
        outputs.append(q[t] + layer_norm(q[t] @ W.T, weight, bias))
    return torch.stack(outputs), W


def run_operator(q, k, v, eta, W, weight, bias, batch):
    norm = {} if weight is None else {"phi_weight": weight}
    w, b = (1.0, 0.0) if weight is None else (weight, bias)
    o, state = ops.ttt(q, k, v - k - b, eta, **norm, chunk=batch, f="layer_norm", state=W)
    return q + w * o + b, state.k


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("norm", [True, False], ids=["weights", "no weights"])
def test_ttt_equals_ttt_linear(batch, norm):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v, W = draw(B, T, H, D), draw(B, T, H, D), draw(B, T, H, D), draw(H, D, D)
    eta = (torch.rand(B, T, H, generator=generator, dtype=torch.float64) / batch).requires_grad_()
    weight, bias = draw(H, D), draw(H, D)
    one, zero = torch.ones(D, dtype=torch.float64), torch.zeros(D, dtype=torch.float64)
    want = [
        [
            ttt_linear(
                *(x[b, :, h] for x in (q, k, v, eta)),
                W[h],
                *((weight[h], bias[h]) if norm else (one, zero)),
                batch,
            )
            for h in range(H)
        ]
        for b in range(B)
    ]
    o = torch.stack([torch.stack([o for o, _ in heads], 1) for heads in want])
    last = torch.stack([torch.stack([A for _, A in heads]) for heads in want])
    leaves = {"q": q, "k": k, "v": v, "eta": eta, "W": W}
    if norm:
        leaves |= {"weight": weight, "bias": bias}

    results = run_operator(q, k, v, eta, W, weight if norm else None, bias, batch)
    assert_within({"o": results[0], "W": results[1]}, {"o": o, "W": last}, 1e-12)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in results]
    grads = [
        dict(zip(leaves, torch.autograd.grad(outs, list(leaves.values()), cotangents), strict=True))
        for outs in (results, (o, last))
    ]
    assert_within(*grads, 1e-9)


def test_the_inner_bias_by_ones_appended_to_keys_and_queries():
    """z = W k + b, with A = [W, b]."""
    generator = torch.Generator().manual_seed(0)
    q, k, a = (torch.randn(1, 7, 1, D, generator=generator, dtype=torch.float64) for _ in range(3))
    eta = torch.rand(1, 7, 1, generator=generator, dtype=torch.float64)
    W, b = (
        torch.randn(D, D, generator=generator, dtype=torch.float64).requires_grad_(),
        torch.zeros(D).double(),
    )
    ones = torch.ones(1, 7, 1, 1, dtype=torch.float64)
    A = torch.cat([W.detach(), b[:, None]], 1)[None]
    o, state = ops.ttt(
        torch.cat([q, ones], -1), torch.cat([k, ones], -1), a, eta, chunk=1, phi="identity", state=A
    )
    for t in range(7):
        u = W @ k[0, t, 0] + b - a[0, t, 0]
        W, b = W - eta[0, t, 0] * torch.outer(u, k[0, t, 0]), b - eta[0, t, 0] * u
        assert_within(o[0, t, 0], W @ q[0, t, 0] + b, 1e-12)
    assert_within(state.k[0, 0], torch.cat([W, b[:, None]], 1), 1e-12)


def test_ttt_equals_the_first_pass_of_trellis():
    """Trellis with zero values and an identity as its second memory reads f(A q)."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, a, A = draw(B, T, 2 * H, D), draw(B, T, H, D), draw(B, T, H, 5), draw(H, 5, D)
    gamma = torch.rand(B, T, H, generator=generator, dtype=torch.float64) / 4
    options = {"chunk": 4, "phi": "l2_silu", "f": "softmax"}
    identity = torch.eye(5, dtype=torch.float64).expand(H, 5, 5)
    want, state = ops.trellis(q, k, torch.zeros_like(a), a, gamma, **options, state=(A, identity))
    o, ttt_state = ops.ttt(q, k, a, gamma, **options, state=A)
    assert_within(o, want, 1e-14)
    assert_within(ttt_state.k, state.k, 1e-14)
