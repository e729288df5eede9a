"""Each reference recurrence agrees with an independent formula."""

import pytest
import recurrences as R
import torch
import torch.nn.functional as F
from comparison import assert_within

T, H, D, V, M = 9, 2, 3, 4, 5


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_gsa_is_a_sum_over_decayed_tokens(draw):
    q, k, v, s, g = (
        draw(1, T, H, D),
        draw(1, T, H, D),
        draw(1, T, H, V),
        draw(1, T, H, M),
        -draw(1, T, H, M).abs(),
    )
    L = g.cumsum(1)
    weight = (L[:, :, None] - L[:, None]).exp() * s[:, None]  # [1, t, i, H, M]
    weight = weight * torch.ones(T, T, dtype=q.dtype).tril()[..., None, None]
    p = torch.einsum("btihm,bihd,bthd->bthm", weight, k, q).mul(D**-0.5).softmax(-1)
    o, (Hk, _, z) = R.gsa(q, k, v, s, g)
    assert z is None
    assert_within(
        {"o": o, "k": Hk},
        {
            "o": torch.einsum("btihm,bihv,bthm->bthv", weight, v, p),
            "k": torch.einsum("bihd,bihm->bhdm", k, weight[:, -1]),
        },
        1e-12,
    )


def test_abc_is_a_softmax_over_the_past(draw):
    q, k, v, s = draw(1, T, H, D), draw(1, T, H, D), draw(1, T, H, V), draw(1, T, H, M)
    o, (Hk, Hv, z) = R.gsa(q, k, v, s)
    weight = s.softmax(1)
    want = {
        "k": torch.einsum("bihd,bihm->bhdm", k, weight),
        "v": torch.einsum("bihm,bihv->bhmv", weight, v),
        "z": s.logsumexp(1),
    }
    want["o"] = torch.einsum(
        "bhmv,bhm->bhv",
        want["v"],
        torch.einsum("bhdm,bhd->bhm", want["k"], q[:, -1]).mul(D**-0.5).softmax(-1),
    )
    assert_within({"o": o[:, -1], "k": Hk, "v": Hv, "z": z}, want, 1e-12)


def test_abc_skips_tokens_whose_logit_is_minus_infinity(draw):
    q, k, v, s = draw(1, T, H, D), draw(1, T, H, D), draw(1, T, H, V), draw(1, T, H, M)
    masked = torch.tensor([True, True, False, False, True, False, False, False, True])
    s[:, masked] = -torch.inf
    o, state = R.gsa(q, k, v, s)
    kept_o, kept_state = R.gsa(*(x[:, ~masked] for x in (q, k, v, s)))
    assert_within(
        {"o": o[:, ~masked], **dict(enumerate(state))}, {"o": kept_o, **dict(enumerate(kept_state))}, 1e-12
    )


def test_gla_is_a_sum_over_decayed_tokens(draw):
    q, k, v, g = draw(1, T, H, D), draw(1, T, H, D), draw(1, T, H, V), -draw(1, T, H, D).abs()
    L = g.cumsum(1)
    past = (L[:, :, None] - L[:, None]).exp() * torch.ones(T, T, dtype=q.dtype).tril()[..., None, None]
    o, _ = R.gla(q, k, v, g)
    assert_within(o, torch.einsum("btihd,bihd,bthd,bihv->bthv", past, k, q, v) * D**-0.5, 1e-12)


def test_a_householder_step_of_size_two_is_a_reflection(draw):
    S = draw(1, H, D, V)
    q, k = draw(1, T, H, D), F.normalize(draw(1, T * 3, H, D), dim=-1)
    beta = torch.full((1, T * 3, H), 2.0, dtype=q.dtype)
    _, (after, _) = R.delta_product(q, k, draw(1, T * 3, H, V) * 0, beta, n=3, state=(S, None))
    assert_within(after.square().sum(-2), S.square().sum(-2), 1e-12)


def test_a_vector_step_with_equal_entries_is_a_scalar_step(draw):
    q, k, v, beta = draw(1, T, H, D), draw(1, T, H, D), draw(1, T, H, D), draw(1, T, H)
    o, _ = R.delta_product(q, k, v, beta)
    vector, _ = R.delta_product(q, k, v, beta[..., None].expand(1, T, H, D))
    assert_within(vector, o, 1e-12)


def test_trellis_without_a_nonlinearity_at_chunk_one_is_the_gated_delta_rule(draw):
    q, k, v, a, gamma, g = (
        draw(1, T, H, D),
        draw(1, T, H, D),
        draw(1, T, H, V),
        draw(1, T, H, M),
        draw(1, T, H),
        -draw(1, T, H).abs(),
    )
    A1, A2 = draw(H, M, D), draw(H, M, V)
    _, (_, A, *_) = R.trellis(q, k, v, a, gamma, g, chunk=1, phi="identity", state=(A1, A2))
    # z reads the memory before the decay: beta k = gamma e^{-g} k and beta v = gamma a.
    _, (S, _) = R.delta_product(
        q, k, a * g.exp()[..., None], gamma * (-g).exp(), g, state=(A1[None].mT, None)
    )
    assert_within(A, S.mT, 1e-12)


def test_lattice_at_chunk_one_moves_every_column_along_its_tangent(draw):
    k, v, gamma, g = draw(1, 1, 1, M), draw(1, 1, 1, D), draw(1, 1, 1), -draw(1, 1, 1).abs()
    S = F.normalize(draw(1, D, M), dim=-2)
    _, state = R.lattice(k, k, v, gamma, g, chunk=1, state=S)
    columns = []
    for i, s in enumerate(S[0].unbind(-1)):
        e = S[0] @ k[0, 0, 0] - v[0, 0, 0]
        d = -gamma.item() * k[0, 0, 0, i] * (torch.eye(D, dtype=s.dtype) - torch.outer(s, s)) @ e
        columns.append(F.normalize(g.exp().item() * s + d, dim=0))
    assert_within(state[0][0, 0], torch.stack(columns, -1), 1e-12)


@pytest.mark.parametrize("objective", ["decode", "encode", "similarity"])
def test_lattice_steps_are_tangent_to_the_first_columns_of_their_chunk(draw, objective):
    S = F.normalize(draw(H, D, M), dim=-2)
    q, k, v, gamma = draw(1, 6, H, M), draw(1, 6, H, M), draw(1, 6, H, D), draw(1, 6, H)
    _, (first, step, _, position) = R.lattice(q, k, v, gamma, chunk=4, objective=objective, state=S)
    assert position.tolist() == [2]
    assert step.abs().max() > 1e-2
    assert_within((first * step).sum(-2), torch.zeros(1, H, M, dtype=q.dtype), 1e-12)


@pytest.mark.parametrize("phi", R.phis)
def test_jacobians_of_phi_are_what_autograd_finds(draw, phi):
    z, w = draw(2, M).requires_grad_(), draw(2, M)
    forward, vjp = R.phis[phi]
    assert_within(vjp(z, w), torch.autograd.grad(forward(z), z, w)[0], 1e-12)


def test_short_conv_is_a_depthwise_convolution(draw):
    x, weight, bias = draw(2, T, 6), draw(6, 4), draw(6)
    want = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight[:, None], bias, groups=6)).mT
    assert_within(R.short_conv(x, weight, bias, activation="silu")[0], want, 1e-12)


def test_gated_rms_norm_is_a_norm_times_a_gate(draw):
    x, weight, gate = draw(2, T, 6), draw(6), draw(2, T, 6)
    norm = F.rms_norm(x, (6,), weight, 1e-3)
    assert_within(R.gated_rms_norm(x, weight, eps=1e-3), norm, 1e-12)
    assert_within(R.gated_rms_norm(x, weight, gate, eps=1e-3), norm * F.silu(gate), 1e-12)


def test_cat_attention_in_one_chunk_is_causal_attention(draw):
    q, k, v = draw(2, T, H, D), draw(2, T, H, D), draw(2, T, H, V)
    want = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(
        1, 2
    )
    assert_within(R.cat_attention(q, k, v, chunk=T), want, 1e-12)


def test_cat_attention_never_reads_the_tokens_of_an_earlier_chunk(draw):
    q, k, v = draw(1, T, H, D), draw(1, T, H, D).requires_grad_(), draw(1, T, H, V)
    (dk,) = torch.autograd.grad(R.cat_attention(q, k, v, chunk=3)[:, 6:].sum(), k)
    read = dk.abs().sum((0, 2, 3)) > 0
    assert read.tolist() == [True, False, False, True, False, False, True, True, True]
