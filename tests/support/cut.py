"""Sequences cut over processes, against the whole sequences (started by test_context_parallel.py, which gives
the names of the parts)."""

import sys
from threading import Event, Thread
from types import SimpleNamespace

import girih
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, ParallelismConfig
from girih import distributed, ops
from girih.distributed import chunks
from girih.models import GirihForCausalLM, GirihForSequenceClassification
from girih.models.adapters.pieces_call import MODEL_TYPES
from girih.nn.functional.packing import make_position_ids
from girih.training.processes import exit_at_once
from small_models import config_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2Model,
    LlamaForSequenceClassification,
    PreTrainedModel,
)

LENGTHS = {2: [22, 13], 4: [5, 9, 0, 7]}
H, D, V, M = 4, 4, 6, 5
ROWS = 4


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def gate(*shape):
    return F.logsigmoid(randn(*shape))


def gla(B, T, g):
    gates = {"none": None, "head": gate(B, T, H), "channel": gate(B, T, H, D)}[g]
    return {"q": randn(B, T, H, D), "k": randn(B, T, 2, D), "v": randn(B, T, H, V), "g": gates}


def gsa(B, T, kind):
    s = {"both": rand(B, T, 2, M), "gates": None, "abc": randn(B, T, 2, M)}[kind]
    data = {"q": randn(B, T, H, D), "k": randn(B, T, 2, D), "v": randn(B, T, 2, V), "s": s}
    if kind == "abc" and T > 8:
        s[:, 3:8, :, 1] = -torch.inf
    return data | {"g": None if kind == "abc" else gate(B, T, 2, M)}


def delta(B, T, n=1, g=False, channels=False, values=V):
    width, key_heads = D if channels else values, 2 if H % 2 == 0 else 1
    beta = rand(B, T * n, H, *[D][:channels])
    data = {
        "q": randn(B, T, H, D),
        "k": randn(B, T * n, key_heads, D),
        "v": randn(B, T * n, H, width),
        "beta": beta,
    }
    return data | {"g": gate(B, T, H) if g else None}


def chunked(B, T, *names):
    sizes = {"q": (H, D), "k": (H, D), "v": (H, V), "a": (H, M), "lattice q": (H, M), "lattice k": (H, M)}
    data = {name.split()[-1]: randn(B, T, *sizes[name]) for name in names if name in sizes}
    return data | {name: rand(B, T, H) / 4 for name in names if name == "gamma"}


def conv_state(B):
    return ops.ShortConvState(randn(B, 3, 6))


def unit(*shape):
    return F.normalize(randn(*shape), dim=-2)


# name: (operator, options, data, state before the sequence); data and state by B and T or by B.
SCANS = {
    "gla": ("gla", {}, lambda B, T: gla(B, T, "none"), lambda B: ops.GLAState(randn(B, H, D, V))),
    "gla, gates of heads": ("gla", {"scale": 0.7}, lambda B, T: gla(B, T, "head"), None),
    "gla, gates of channels": (
        "gla",
        {},
        lambda B, T: gla(B, T, "channel"),
        lambda B: ops.GLAState(randn(B, H, D, V)),
    ),
    "gsa": (
        "gsa",
        {},
        lambda B, T: gsa(B, T, "both"),
        lambda B: ops.GSAState(randn(B, 2, D, M), randn(B, 2, M, V), None),
    ),
    "gsa, gates": ("gsa", {"feature": "silu"}, lambda B, T: gsa(B, T, "gates"), None),
    "abc": (
        "gsa",
        {},
        lambda B, T: gsa(B, T, "abc"),
        lambda B: ops.GSAState(randn(B, 2, D, M), randn(B, 2, M, V), randn(B, 2, M)),
    ),
    "abc, no state": ("gsa", {}, lambda B, T: gsa(B, T, "abc"), None),
    "delta_product": (
        "delta_product",
        {"n": 1, "l2norm_qk": True},
        lambda B, T: delta(B, T),
        lambda B: ops.DeltaProductState(randn(B, H, D, V)),
    ),
    "delta_product, two steps, gates": (
        "delta_product",
        {"n": 2, "l2norm_qk": True},
        lambda B, T: delta(B, T, 2, True),
        None,
    ),
    "delta_product, wide values": (  # D + V exceeds the kernels' widths
        "delta_product",
        {"n": 1, "l2norm_qk": True},
        lambda B, T: delta(B, T, values=256),
        lambda B: ops.DeltaProductState(randn(B, H, D, 256)),
    ),
    "delta_product, beta of channels": (
        "delta_product",
        {"n": 1, "l2norm_qk": True},
        lambda B, T: delta(B, T, channels=True),
        lambda B: ops.DeltaProductState(randn(B, H, D, D)),
    ),
}
BY_HEADS = {
    "trellis": (
        "trellis",
        {"chunk": 4},
        lambda B, T: chunked(B, T, "q", "k", "v", "a", "gamma") | {"g": gate(B, T, H)},
        lambda B: (randn(H, M, D), randn(B, H, M, V)),
    ),
    "ttt": (
        "ttt",
        {"chunk": 4},
        lambda B, T: chunked(B, T, "q", "k", "a", "gamma"),
        lambda B: randn(H, M, D),
    ),
    "lattice": (
        "lattice",
        {"chunk": 4},
        lambda B, T: (
            chunked(B, T, "lattice q", "lattice k") | {"v": randn(B, T, H, D), "gamma": rand(B, T, H) / 4}
        ),
        lambda B: unit(H, D, M),
    ),
    "between_chunks": (
        "delta_product",
        {"n": 2, "chunk": 4, "between_chunks": "tanh", "l2norm_qk": True},
        lambda B, T: delta(B, T, 2, True),
        None,
    ),
}


def leaves_of(data, state):
    leaves = {name: x for name, x in data.items() if x is not None}
    parts = () if state is None else (state,) if isinstance(state, torch.Tensor) else state
    return leaves | {f"state {i}": x for i, x in enumerate(floats(parts))}


def require_gradients(data, state):
    for x in leaves_of(data, state).values():
        if x.is_floating_point():
            x.requires_grad_()


def floats(state):
    return [x for x in state or () if x is not None and x.is_floating_point()]


def copied(state):
    if state is None or isinstance(state, torch.Tensor):
        return state if state is None else state.detach().clone()
    parts = [None if x is None else x.detach().clone() for x in state]
    return type(state)(*parts) if hasattr(state, "_fields") else tuple(parts)


def valid_part(x, name, bounds):
    """x with the padding of its rows set to zero; what an operator computes there is unspecified."""
    if bounds is None:
        return x
    token = torch.arange(x.shape[1] // rows_of(name))
    keep = (token >= bounds[:, :1]) & (token < bounds[:, 1:])
    keep = keep.repeat_interleave(rows_of(name), 1)
    return x.where(keep.view(*keep.shape, *[1] * (x.dim() - 2)), 0)


rows_per_token = 1


def rows_of(name):
    return rows_per_token if name in ("k", "v", "beta") else 1


def check_operator(name, operator, options, make, make_state, kind, final_state=True):
    """Outputs, final states and gradients of the pieces equal those of the whole sequence. kind: rows,
    packed, or padded. final_state: whether the final state is wanted."""
    global rows_per_token
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    lengths = LENGTHS[size]
    T, B = sum(lengths), 1 if kind == "packed" else ROWS
    rows_per_token = options.get("n", 1)
    data = make(B, T)
    sequences = 6 if kind == "packed" else B
    without_state = make_state is None or (kind == "packed" and name in SCANS)
    state = None if without_state else make_state(sequences)
    require_gradients(data, state)
    start, own = sum(lengths[:rank]), lengths[rank]
    whole, local = {}, {} if final_state else {"final_state": False}
    if kind == "packed":
        bounds = torch.tensor([0, 3, 3, lengths[0], T - 9, T - 2, T])
        whole["cu_seqlens"], local["group"] = bounds, distributed.Pieces.cut(None, own, bounds)
    own_bounds = None
    if kind == "padded":  # valid tokens of each piece first
        every = [torch.tensor([[0, max(n - b, 0)] for b in range(B)]) for n in lengths]
        own_bounds, local["bounds"] = every[rank], every[rank]
    indices = [
        [
            t + sum(lengths[:r])
            for r, n in enumerate(lengths)
            for t in range(max(n - b, 0) if own_bounds is not None else n)
        ]
        for b in range(B)
    ]

    # The whole: for padded rows, each row on its own, without its padding.
    parts = [slice(None)] if kind != "padded" else [slice(b, b + 1) for b in range(B)]

    def rows(x, part, name):
        x = x[part]
        if kind != "padded":
            return x
        m = rows_of(name)
        return x[:, [t * m + j for t in indices[part.start] for j in range(m)]]

    def state_of(part):
        if state is None or isinstance(state, torch.Tensor):
            return state if state is None or state.dim() == 3 else state[part]
        if hasattr(state, "_fields"):
            return type(state)(*(None if x is None else x[part] for x in state))
        return tuple(x if x.dim() == 3 else x[part] for x in state)

    outputs, finals = [], []
    for part in parts:
        inputs = [None if x is None else rows(x, part, n) for n, x in data.items()]
        o, final = getattr(ops, operator)(*inputs, state=state_of(part), **options, **whole)
        outputs.append(o)
        finals.append(floats(final))
    weight = [randn(*o.shape) for o in outputs]
    loss = sum((o * w).sum() for o, w in zip(outputs, weight, strict=True))
    ends = [torch.cat(x) for x in zip(*finals, strict=True)]
    compares_ends = final_state and (kind != "packed" or name in BY_HEADS)
    end_weight = [randn(*x.shape) for x in ends]
    if compares_ends:
        loss = loss + sum((x * w).sum() for x, w in zip(ends, end_weight, strict=True))
    leaves = leaves_of(data, state)
    want = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    piece = {
        n: None if x is None else x.detach()[:, start * rows_of(n) : (start + own) * rows_of(n)].clone()
        for n, x in data.items()
    }
    own_state = copied(state)
    require_gradients(piece, own_state)
    o, final = getattr(distributed, operator)(*piece.values(), state=own_state, **options, **local)
    o_weight = torch.zeros(B, T, *o.shape[2:], dtype=torch.float64)
    expected = torch.zeros_like(o_weight)
    for b in range(len(parts)):
        for source, to in ((weight[b], o_weight), (outputs[b].detach(), expected)):
            if kind == "padded":
                to[b, indices[b]] = source[0]
            else:
                to.copy_(source)
    mine = slice(start, start + own)
    loss = (valid_part(o, "o", own_bounds) * o_weight[:, mine]).sum()
    if compares_ends:
        # The loss of the final state is counted once, by the last rank.
        last = float(rank == size - 1)
        loss = loss + last * sum((x * w).sum() for x, w in zip(floats(final), end_weight, strict=True))
    leaves = leaves_of(piece, own_state)
    got = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

    def assert_near(what, x, y):
        torch.testing.assert_close(
            x, y, rtol=1e-9, atol=1e-9, msg=lambda text: f"{name}, {kind}, {what}: {text}"
        )

    assert_near("o", valid_part(o.detach(), "o", own_bounds), expected[:, mine])
    if compares_ends:
        for i, (x, y) in enumerate(zip(floats(final), ends, strict=True)):
            assert_near(f"final state {i}", x.detach(), y.detach())
    for n, x in got.items():
        if n in data:
            m = rows_of(n)
            assert_near(f"d{n}", valid_part(x, n, own_bounds), want[n][:, start * m : (start + own) * m])
        else:
            dist.all_reduce(x)
            assert_near(f"d{n}", x, want[n])


def check_short_conv(kind):
    torch.manual_seed(0)
    weight, bias = randn(6, 4).requires_grad_(), randn(6).requires_grad_()
    original = ops.short_conv, distributed.short_conv

    class Whole:
        @staticmethod
        def conv(x, state=None, **options):
            return original[0](x, weight, bias, activation="silu", state=state, **options)

    class Cut:
        @staticmethod
        def conv(x, state=None, **options):
            return original[1](x, weight, bias, activation="silu", state=state, **options)

    ops.conv, distributed.conv = Whole.conv, Cut.conv
    try:
        check_operator(
            "short_conv",
            "conv",
            {},
            lambda B, T: {"x": randn(B, T, 6)},
            None if kind == "packed" else conv_state,
            kind,
        )
    finally:
        del ops.conv, distributed.conv


def operators():
    for kind in ("rows", "packed", "padded"):
        for name, case in (SCANS | BY_HEADS).items():
            check_operator(name, *case, kind)
            if name in SCANS and kind != "packed":
                check_operator(name, *case, kind, final_state=False)
        check_short_conv(kind)


def attentions():
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks.BLOCK_ROWS = 4  # blocks of one chunk
    for packed in (False, True):
        for chunk, lengths in ((4, {2: [8, 14], 4: [8, 4, 0, 6]}[size]), (None, LENGTHS[size])):
            torch.manual_seed(0)
            T, start = sum(lengths), sum(lengths[:rank])
            B = 1 if packed else 2
            q, k, v = (randn(B, T, h, x).requires_grad_() for h, x in ((H, D), (2, D), (2, V)))
            own = slice(start, start + lengths[rank])
            if chunk is not None:
                bounds = torch.tensor([0, 1, 3, -(-T // chunk)]) if packed else None
                o = ops.cat_attention(q, k, v, chunk=chunk, cu_chunks=bounds)
                piece = [x.detach()[:, own].requires_grad_() for x in (q, k, v)]
                group = distributed.Pieces.cut(None, lengths[rank])
                found = distributed.cat_attention(*piece, chunk=chunk, group=group, cu_chunks=bounds)
            else:
                bounds = torch.tensor([0, 3, lengths[0] + 2, T]) if packed else None
                token = torch.arange(T)
                sees = (token <= token[:, None]) & (token > token[:, None] - 6)
                if packed:
                    sequence = torch.searchsorted(bounds, token, right=True)
                    sees &= sequence == sequence[:, None]
                heads_first = [x.transpose(1, 2) for x in (q, k, v)]
                o = F.scaled_dot_product_attention(*heads_first, attn_mask=sees, enable_gqa=True).transpose(
                    1, 2
                )
                piece = [x.detach()[:, own].requires_grad_() for x in (q, k, v)]
                group = distributed.Pieces.cut(None, lengths[rank], bounds)
                found = distributed.attention(*piece, group=group, window=6)
            weight = randn(*o.shape)
            want = torch.autograd.grad((o * weight).sum(), (q, k, v))
            got = torch.autograd.grad((found * weight[:, own]).sum(), piece)
            for x, y in zip((found, *got), (o, *want), strict=True):
                torch.testing.assert_close(x, y[:, own], rtol=1e-9, atol=1e-9)


MIXERS = [*girih.nn.MIXERS, ["cat", "gsa"]]
HYBRID = ["gsa", "attention", "gated_deltanet", "trellis"]
T = 37


def batch_of(kind):
    torch.manual_seed(1)
    ids = torch.randint(32, (1 if kind == "packed" else 2, T))
    labels = ids.clone()
    labels[0, 5] = -100
    more = {}
    if kind == "masked":
        mask = torch.ones(2, T, dtype=torch.long)
        mask[0, :9], mask[1, 30:], mask[1, 3] = 0, 0, 0
        more["attention_mask"], labels = mask, labels.masked_fill(mask == 0, -100)
    if kind == "packed":
        more["cu_seqlens"] = torch.tensor([0, 7, 15, 30, T], dtype=torch.int32)
    return {"input_ids": ids, "labels": labels, **more}


def model_of(mixer, **options):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_heads": 4,
        "num_hidden_layers": len(mixer) if isinstance(mixer, list) else 1,
    } | options
    return GirihForCausalLM(config_of(**sizes, mixer=mixer)).double().train()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def models():
    """Losses and gradients of models whose sequences are cut, with every way to give a batch."""
    for i, mixer in enumerate([*MIXERS, HYBRID]):
        kinds = ("plain", "masked", "packed") if mixer == HYBRID else (("plain", "masked", "packed")[i % 3],)
        for kind in kinds:
            for in_chunks in (False, True) if mixer == HYBRID else (i % 2 == 0,):
                model, batch = model_of(mixer, loss_in_chunks=in_chunks), batch_of(kind)
                compare_cut(model, batch, mixer, kind, checkpoints=mixer == HYBRID and in_chunks)
    for kind in ("masked", "packed"):  # states are passed from rank to rank
        compare_cut(model_of("ttt", num_heads=3, hidden_size=18), batch_of(kind), "ttt", kind)
    for kind in ("plain", "masked", "packed"):
        whole = model_of("cat", chunk=4, num_hidden_layers=2, max_position_embeddings=64)
        compare_cut(whole, batch_of(kind), "cat", kind, checkpoints=kind == "plain")
        compare_cut(model_of(["cat", "cat"], chunk=3), batch_of(kind), "layers of cat", kind)
        # Every rank chooses a random chunk, and reads with that of the first rank.
        adaptive = model_of("cat", chunk=4, chunks=[2, 4, 8], max_position_embeddings=64)
        compare_cut(adaptive, batch_of(kind), "adaptive cat", kind)


def compare_cut(model, batch, mixer, kind, checkpoints=False):
    """The loss and the gradients of a model within the context equal those of the whole sequences."""
    rank = dist.get_rank()
    torch.manual_seed(5)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    want = gradients(model)
    model.zero_grad()
    if checkpoints:
        model.gradient_checkpointing_enable()
    torch.manual_seed(5 + rank)
    with girih.context_parallel():
        output = model(**batch)
        output.loss.backward()
    torch.testing.assert_close(output.loss, loss, rtol=1e-6, atol=0)
    got = gradients(model)
    assert set(got) == set(want), (mixer, kind, set(got) ^ set(want))
    for name, grad in got.items():
        dist.all_reduce(grad)
        torch.testing.assert_close(
            grad / dist.get_world_size(),
            want[name],
            rtol=1e-8,
            atol=1e-9,
            msg=lambda text, name=name: f"{mixer}, {kind}, {name}: {text}",
        )


def llama_of(kind="llama", **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        pad_token_id=0,
        **options,
    )
    return AutoModelForCausalLM.from_config(config).double().train()


CONVERSIONS = {
    "attention": lambda model: None,
    "inject": lambda model: girih.inject(model, n=2, weight=0.3),
    "inject, window": lambda model: girih.inject(model, pool="window", virtual_tokens="both", weight=0.3),
    "inject, between chunks": lambda model: girih.inject(model, between_chunks="tanh", chunk=4, weight=0.3),
    "inject, linear attention": lambda model: girih.inject(
        model, mixer="linear_attention", cross=True, weight=0.3
    ),
    "gated_deltanet": lambda model: girih.replace_attention(model, "gated_deltanet"),
    "gsa, hybrid": lambda model: girih.replace_attention(model, "gsa", layers=[0], num_slots=4),
    "trellis": lambda model: girih.replace_attention(model, "trellis", num_slots=4),
}


def converted():
    """Models of transformers, converted or not, whose sequences are cut."""
    for i, (name, convert) in enumerate(CONVERSIONS.items()):
        for kind in (
            ("plain", "masked", "packed")
            if name in ("attention", "inject")
            else (("plain", "masked", "packed")[i % 3],)
        ):
            model, batch = llama_of(), batch_of(kind)
            if kind == "packed":
                batch["position_ids"] = make_position_ids(batch.pop("cu_seqlens"), T)
            if kind == "masked":  # the outputs at masked tokens are unspecified
                mask = batch["attention_mask"].bool()
                batch["labels"][:, 1:].masked_fill_(~mask[:, :-1], -100)
            convert(model)
            compare_cut(model, batch, name, kind, checkpoints=kind == "plain")
    for kind in MODEL_TYPES:
        options = {"sliding_window": 5} if kind in ("mistral", "phi3") else {}
        if kind in ("qwen2", "qwen3", "smollm3"):
            options = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
        compare_cut(llama_of(kind, **options), batch_of("plain"), "attention", kind)
    batch = batch_of("plain")
    # The last piece would be empty if four ranks had two tokens each.
    short = {name: x[:, :5] for name, x in batch.items()}
    compare_cut(llama_of(), short, "attention", "short")
    batch["shift_labels"] = batch["labels"].roll(-3, 1)
    compare_cut(llama_of(), batch, "attention", "labels that are shifted by the caller")
    own = model_of(["attention", "attention"])
    girih.inject(own, layers=[0], weight=0.3)
    girih.replace_attention(own, "gla", layers=[1])
    compare_cut(own, batch_of("masked"), "a converted girih model", "masked")


def training():
    """Two steps of AdamW by FSDP2 on a mesh with context parallel, two rows of data beside each other with
    four ranks, equal those of one process."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "cp"))
    batches = [batch_of("plain") for _ in range(2)]
    for i, batch in enumerate(batches):
        batch["input_ids"] = batch["labels"] = (batch["input_ids"] + i) % 32

    def steps(model, share):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        losses = []
        for batch in batches:
            loss = model(**{name: x[share] for name, x in batch.items()}, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    whole = model_of(HYBRID)
    want = steps(whole, slice(None))
    cut = distributed.shard(model_of(HYBRID), mesh=mesh["dp", "cp"]._flatten("all"))
    row = mesh.get_local_rank("dp") if size == 4 else slice(None)
    with girih.context_parallel(mesh["cp"]):
        got = steps(cut, slice(row, row + 1) if size == 4 else row)
    for x, y in zip(got, want, strict=True):
        x = x.clone()
        dist.all_reduce(x)
        torch.testing.assert_close(x / size, y, rtol=1e-6, atol=0)
    for (name, p), q in zip(cut.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(
            p.full_tensor(), q, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def check_resumed(name, kind, *, heads, rows):
    """`check_operator` with a state after some tokens."""
    global H, ROWS
    before, (H, ROWS) = (H, ROWS), (heads, rows)
    operator, options, make, first = BY_HEADS[name]

    def resumed(B):
        state = None if first is None else first(B)
        with torch.no_grad():
            data = make(B, 5)
            return getattr(ops, operator)(*data.values(), state=state, **options)[1]

    # Lattice's steps are orthogonal to their columns. Their gradients along the columns have no meaning, and
    # change where a chunk is cut.
    if name != "lattice" or rows % dist.get_world_size() == 0:
        check_operator(name, operator, options, make, resumed, kind)
    check_operator(name, operator, options, make, first, kind)
    H, ROWS = before


def compiled():
    """Blocks under torch.compile: compiled for whole sequences first, then within the context."""
    model, batch = model_of("gla"), batch_of("plain")
    for block in model.model.layers:
        block.compile(backend="aot_eager")
    compare_cut(model, batch, "compiled", "plain")


def rows_and_precision():
    """Shares that are rows of the batch, with states after some tokens; autocast; one call of hooks."""
    for name in ("trellis", "lattice"):
        for kind in ("rows", "padded"):
            check_resumed(name, kind, heads=3, rows=4)
    for name in BY_HEADS:  # states are passed from rank to rank: the ranks divide neither heads nor rows
        for heads, rows in ((3, 3), (5, 1)):
            for kind in ("rows", "packed", "padded"):
                check_resumed(name, kind, heads=heads, rows=rows)
    own, dtype = LENGTHS[dist.get_world_size()][dist.get_rank()], torch.bfloat16
    torch.manual_seed(dist.get_rank())
    q, v, beta = (torch.randn(1, own, 2, 16) for _ in range(3))
    state = ops.DeltaProductState(torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0)))
    found = []
    for x, y in ((q, v), (q.to(dtype), v.to(dtype))):
        with torch.autocast("cpu", dtype, enabled=x.dtype != dtype):
            found.append(
                distributed.delta_product(x, x, y, beta[..., 0].sigmoid(), l2norm_qk=True, state=state)
            )
    (o, after), (want, want_after) = found
    assert o.dtype == dtype
    torch.testing.assert_close(o, want, rtol=0, atol=0)
    torch.testing.assert_close(after.s, want_after.s, rtol=0, atol=0)
    # Gates may have a wider dtype than q.
    o, after = distributed.gla(*[x.to(dtype) for x in (q, q, v)], -beta[..., 0].double().exp())
    assert o.dtype == dtype and after.s.dtype == torch.float32
    model, calls = model_of("gla"), []
    model.model.register_forward_hook(lambda *call: calls.append(call))
    with girih.context_parallel():
        model(**batch_of("plain"))
    assert len(calls) == 1


def threads():
    """A thread that leaves its context does not change the calls of another thread within its own."""
    model, ids, entered, left = llama_of(), batch_of("plain")["input_ids"], Event(), Event()

    def enter():
        with girih.context_parallel():
            entered.set()
            left.wait()

    thread = Thread(target=enter)
    thread.start()
    entered.wait()
    with girih.context_parallel():
        left.set()
        thread.join()
        assert model(ids).logits.shape[1] < T
    assert "__call__" not in vars(PreTrainedModel)
    assert model(ids).logits.shape[1] == T


def refusals():
    def message(call):
        try:
            call()
        except (TypeError, ValueError) as error:
            return str(error)
        raise AssertionError("nothing was refused")

    model, batch = model_of("gsa"), batch_of("plain")
    with girih.context_parallel():
        assert "use_cache: context_parallel has no cache" in message(lambda: model(**batch, use_cache=True))
        assert "logits_to_keep: context_parallel" in message(lambda: model(**batch, logits_to_keep=1))
        llama, ids = llama_of(), batch["input_ids"]
        assert "use_cache: context_parallel has no cache" in message(lambda: llama.generate(ids))
        assert "logits_to_keep: context_parallel" in message(lambda: llama(ids, logits_to_keep=1))
        eager = llama_of(attn_implementation="eager")
        assert "attn_implementation is 'eager' but should be 'sdpa'" in message(lambda: eager(ids))
        assert "attention_dropout is 0.5" in message(lambda: llama_of(attention_dropout=0.5)(ids))
        gpt = GPT2Model(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2))
        assert "GPT2Model reads whole sequences" in message(lambda: gpt(ids))
        windowed = llama_of()
        girih.inject(windowed, max_self_attn_length=4)
        assert "max_self_attn_length of model.layers.0.self_attn should be None" in message(
            lambda: windowed(ids)
        )
        for cut in (model, llama):  # the first ranks have all labels of their pieces
            assert f"labels has shape [2, {T - 1}]; expected [B, T] = [2, {T}]" in message(
                lambda cut=cut: cut(ids, labels=ids[:, :-1])
            )
        assert "shift_labels has shape" in message(lambda: llama(ids, labels=ids, shift_labels=ids[:, 1:]))
        assert "attention_mask is a dict" in message(lambda: llama(ids, attention_mask={}))
        assert "input_ids, inputs_embeds: give exactly one" in message(llama)
        assert "input_ids has 1 tokens; expected at least" in message(lambda: llama(ids[:, :1]))
        assert "multiple values for argument 'input_ids'" in message(lambda: llama(ids, input_ids=ids))
        assert "too many positional arguments" in message(lambda: llama(ids, *[None] * 20))
        for rope in (
            {"rope_type": "dynamic", "factor": 2.0},
            {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [3.0, 4.0]},
        ):
            rope = llama_of(rope_parameters={"rope_theta": 10000.0, **rope})
            assert "rope_type of model.rotary_emb is" in message(lambda rope=rope: rope(ids))
        scores = LlamaForSequenceClassification(llama.config)
        assert "LlamaForSequenceClassification reads whole" in message(lambda: scores(ids))
        scores = GirihForSequenceClassification(model.config)
        assert "SequenceClassification reads whole" in message(lambda: scores(batch["input_ids"]))
        model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
        assert "layers.0 is a CheckpointWrapper" in message(lambda: model(**batch))
    plan = SimpleNamespace(parallelism_config=ParallelismConfig(cp_size=2))
    assert "cp_size is 2; expected 1: GirihForCausalLM cannot read" in message(
        lambda: Accelerator._prepare_cp(plan, model_of("gla"))
    )
    llama = llama_of()
    girih.inject(llama)
    assert "InjectedLlamaAttention cannot read" in message(lambda: Accelerator._prepare_cp(plan, llama))
    own = LENGTHS[dist.get_world_size()][dist.get_rank()]
    x = randn(1, own, 3, 4)
    pieces = distributed.Pieces.cut(None, own)
    assert "girih.distributed.delta_product: chunk is 4 but should be None without between_chunks" in message(
        lambda: distributed.delta_product(x, x, x, x[..., 0], chunk=4, group=pieces)
    )
    longer = randn(1, own + 1, 3, 4)
    assert "as the pieces say" in message(lambda: distributed.gla(longer, longer, longer, group=pieces))
    assert "should rise from 0 to" in message(lambda: distributed.Pieces.cut(None, own, torch.tensor([0, 3])))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for part in sys.argv[1:]:
        globals()[part]()
    dist.barrier()  # no rank leaves the group while another one uses it
    dist.destroy_process_group()
    exit_at_once(0)
