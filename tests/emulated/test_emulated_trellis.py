"""The kernels of trellis and ttt, emulated on the CPU (tests/emulated): forward and all gradients."""

import ctypes

import pytest
import recurrences
import torch
import torch.nn.functional as F
from emulated import (
    DTYPES,
    NUMBER,
    POINTER,
    Array,
    assert_close,
    assert_rest_unwritten,
    guarded_copy,
    guarded_nan,
    load_kernels,
    needs_headers,
    padded_rows,
    round_up_8,
    structure,
)

pytestmark = needs_headers

# (whether silu is applied, the norm's value in the kernels' enum)
MAPS = {
    "identity": (0, 0),
    "silu": (1, 0),
    "l2norm": (0, 1),
    "layer_norm": (0, 2),
    "l2_silu": (1, 1),
    "ln_silu": (1, 2),
    "softmax": (0, 3),
}


Call = structure(
    (NUMBER, "architecture dtype batch tokens sequences"),
    (POINTER, "cu_seqlens"),
    (NUMBER, "chunk"),
    (POINTER, "position"),
    (NUMBER, "heads D V M slots silu norm f_silu f_norm memory_count"),
    (Array, "q"),
    (Array * 2, "x"),
    (Array, "a weight gamma g"),
    (Array * 2, "first initial last_first last"),
    (POINTER, "last_position"),
    (POINTER * 2, "memories"),
    (Array * 2, "u z row_stats"),
    (Array, "o dout dq"),
    (Array * 2, "dlast_first dlast dfirst dinitial da dx"),
    (Array, "dweight dgamma dg"),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    return load_kernels(tmp_path_factory, "trellis")


class Run:
    """One call: its tensors, the results of the kernels (`got`) and of the recurrence in float64 (`want`).
    With one pass (ttt) there is no V."""

    def __init__(
        self,
        kernels,
        chunk,
        lengths,
        *,
        position=None,
        D=64,
        V=64,
        M=64,
        H=1,
        gates=0.1,
        packed=False,
        phi="ln_silu",
        f="ln_silu",
        memory_count=2,
        weighted=False,
        dtype=torch.bfloat16,
        architecture=90,
    ):
        generator = torch.Generator().manual_seed(chunk + sum(lengths))
        N, widths = len(lengths), (D, V)[:memory_count]
        V, out = (V, V) if memory_count == 2 else (0, M)
        B, T = (1, sum(lengths) + 3) if packed else (N, lengths[0])

        def normal(*shape):
            return torch.randn(shape, generator=generator)

        def unit(x):
            return F.normalize(x, dim=-1) if phi in ("identity", "silu") else x

        def state(memory, scale=1.0):
            padded = guarded_nan(N, H, M, round_up_8(widths[memory])).zero_()
            padded[..., : widths[memory]] = scale * normal(N, H, M, widths[memory])
            return padded

        def rows(width, values=None):
            return padded_rows(B, T, H, width, values=values, dtype=dtype)

        def both(make):
            return [make(m) for m in range(memory_count)]

        position = None if position is None else guarded_copy(torch.tensor(position))
        one = {
            name: rows(n, x)
            for name, n, x in (
                ("q", D, normal(B, T, H, D)),
                ("a", M, normal(B, T, H, M)),
                ("dout", out, normal(B, T, H, out)),
            )
        }
        one["gamma"] = guarded_copy(torch.rand(B, T, H, generator=generator) / max(chunk, 4))
        one["g"] = None if gates is None else guarded_copy(-gates * torch.rand(B, T, H, generator=generator))
        if weighted:
            one["weight"] = guarded_copy(F.pad(1 + 0.25 * normal(H, M), (0, round_up_8(M) - M)))
            one["dweight"] = guarded_nan(N, H, round_up_8(M))
        one |= {"o": rows(out), "dq": rows(D)}
        one |= {"dgamma": guarded_nan(B, T, H), "dg": None if gates is None else guarded_nan(B, T, H)}
        x = [rows(n, unit(normal(B, T, H, n))) for n in widths]
        initial = both(lambda m: state(m, widths[m] ** -0.5))
        first = both(lambda _: None)
        if position is not None:
            begins = (position == 0)[:, None, None, None]
            first = both(lambda m: guarded_copy(torch.where(begins, initial[m], state(m, widths[m] ** -0.5))))
        two = {"x": x, "initial": initial, "first": first}
        two |= {name: both(lambda m: state(m)) for name in ("dlast_first", "dlast")}
        two |= {
            name: both(lambda m: guarded_nan(*initial[m].shape))
            for name in ("last_first", "last", "dinitial")
        }
        two["dfirst"] = first if position is None else both(lambda m: guarded_nan(*initial[m].shape))
        two |= {n: both(lambda m: rows(M)) for n in ("u", "z", "da")}
        two |= {
            "row_stats": both(lambda m: guarded_nan(B, T, H, 8 if weighted else 4)),
            "dx": both(lambda m: rows(widths[m])),
        }

        starts = [sum(lengths[:i]) for i in range(N)]
        cu_seqlens = guarded_copy(torch.tensor([*starts, sum(lengths)]))
        last_position = guarded_nan(N, dtype=torch.int64)
        call = Call(
            architecture=architecture,
            dtype=DTYPES[dtype],
            batch=B,
            tokens=T,
            sequences=N,
            chunk=chunk,
            heads=H,
            D=round_up_8(D),
            V=round_up_8(V),
            M=round_up_8(M),
            slots=M,
            memory_count=memory_count,
        )
        call.silu, call.norm = MAPS[phi]
        call.f_silu, call.f_norm = MAPS[f]
        call.cu_seqlens = cu_seqlens.data_ptr() if packed else None
        call.position = None if position is None else position.data_ptr()
        call.last_position = last_position.data_ptr()
        for name, tensor in one.items():
            setattr(call, name, Array.of(tensor))
        for name, pair in two.items():
            setattr(call, name, (Array * 2)(*map(Array.of, pair)))
        chunks = kernels.chunks(ctypes.byref(call))
        tile = 64 if max(D, V, M) <= 64 else 128
        memories = both(lambda m: guarded_nan(chunks, H, tile, tile, dtype=dtype))
        call.memories = (ctypes.c_void_p * 2)(*(tensor.data_ptr() for tensor in memories))
        results = [one["o"], last_position, *two["last_first"], *two["last"]]
        kernels.run_forward(ctypes.byref(call), False)
        alone = [result.clone() for result in results]
        for result in results:
            result.fill_(-1 if result.dtype == torch.int64 else torch.nan)
        kernels.run_forward(ctypes.byref(call), True)
        for without, result in zip(alone, results, strict=True):
            assert torch.equal(without.nan_to_num(), result.nan_to_num()), "saved tensors change a result"
        kernels.run_backward(ctypes.byref(call))

        def wide(tensor, width):
            return tensor[..., :width].double()

        leaves = {"q": wide(one["q"], D)} | {
            n: wide(x[m], widths[m]) for m, n in enumerate("kv"[:memory_count])
        }
        leaves["a"] = wide(one["a"], M)
        leaves["gamma"] = one["gamma"].double()
        if gates is not None:
            leaves["g"] = one["g"].double()
        for kind, pair in (("state", initial), ("state_first", first)):
            if pair[0] is not None:
                leaves |= {f"{kind}_{n}": wide(pair[m], widths[m]) for m, n in enumerate("kv"[:memory_count])}
        if weighted:
            leaves["phi_weight"] = wide(one["weight"], M)
        for leaf in leaves.values():
            leaf.requires_grad_()
        total, o, finals = 0.0, [], []
        for n in range(N):
            row, low = (0, starts[n]) if packed else (n, 0)
            part = {
                m: leaf[row : row + 1, low : low + lengths[n]]
                for m, leaf in leaves.items()
                if "state" not in m and m != "phi_weight"
            }
            part |= {m: leaf for m, leaf in leaves.items() if m == "phi_weight"}
            own = {m.removeprefix("state_"): leaf[n : n + 1] for m, leaf in leaves.items() if "state" in m}
            start = tuple(own[name] for name in "kv"[:memory_count])
            if position is not None:
                start = tuple(own[f"{kind}{n}"] for n in "kv"[:memory_count] for kind in ("first_", ""))
                start += (position[n : n + 1],)
            if memory_count == 2:
                y, final = recurrences.trellis(**part, chunk=chunk, phi=phi, f=f, state=start)
            else:
                start = start if position is not None else start[0]
                y, final = recurrences.ttt(**part, chunk=chunk, phi=phi, f=f, state=start)
            total = total + (y * wide(one["dout"], out)[row : row + 1, low : low + lengths[n]]).sum()
            for i, name in enumerate(("dlast_first", "dlast")):
                for m in range(memory_count):
                    total = total + (final[2 * m + i] * wide(two[name][m], widths[m])[n : n + 1]).sum()
            o.append(y.detach())
            finals.append(final)
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)

        tokens = slice(0, sum(lengths) if packed else T)
        for name in ("o", "dq", "dgamma", *([] if gates is None else ["dg"])):
            assert_rest_unwritten(name, one[name], tokens)
        for name in ("u", "z", "da", "dx"):
            for x in two[name]:
                assert_rest_unwritten(name, x, tokens)
        self.want = {"o": torch.cat(o, 1 if packed else 0)}
        self.want |= {
            f"d{name}": x if "state" in name or name == "phi_weight" else x[:, tokens]
            for name, x in zip(leaves, found, strict=True)
        }
        got = {"o": (one["o"], out), "dq": (one["dq"], D)}
        got |= {f"d{n}": (two["dx"][m], widths[m]) for m, n in enumerate("kv"[:memory_count])}
        got |= {
            "da": (sum(two["da"]), M),
            "dgamma": (one["dgamma"], T),
            "dg": (one["dg"], T),
        }
        self.got = {
            name: (x[..., :width] if x.dim() == 4 else x)[:, tokens]
            for name, (x, width) in got.items()
            if x is not None
        }
        if weighted:
            self.got["dphi_weight"] = one["dweight"].sum(0)[..., :M]
        for m, name in enumerate("kv"[:memory_count]):
            self.got[f"dstate_{name}"] = two["dinitial"][m][..., : widths[m]]
            if position is not None:
                self.got[f"dstate_first_{name}"] = two["dfirst"][m][..., : widths[m]]
            for i, kind in enumerate(("last_first", "last")):
                self.got[f"{kind}_{name}"] = two[kind][m][..., : widths[m]]
                self.want[f"{kind}_{name}"] = torch.cat([final[2 * m + i].detach() for final in finals])
        first_positions = [0] * N if position is None else position.tolist()
        assert last_position.tolist() == [
            (b + n) % chunk for b, n in zip(first_positions, lengths, strict=True)
        ]

    def check(self):
        assert_close(self.got, self.want)


@pytest.mark.parametrize("f", ["ln_silu", "softmax", "identity"])
@pytest.mark.parametrize("phi", MAPS)
def test_every_map(kernels, phi, f):
    Run(kernels, 16, [21], position=[3], D=20, V=24, M=40, gates=0.2, phi=phi, f=f).check()


@pytest.mark.parametrize("T", [1, 15, 16, 17, 33])
def test_every_length(kernels, T):
    Run(kernels, 16, [T], position=[5]).check()


@pytest.mark.parametrize("chunk", [7, 17, 32, 48, 63, 64])
def test_every_chunk(kernels, chunk):
    Run(kernels, chunk, [70], position=[chunk // 2], gates=0.05).check()


def test_chunks_of_a_token(kernels):
    Run(kernels, 1, [20], gates=0.05).check()


# Every reader and loader has several tiles, and every stage of the rings is reused.
@pytest.mark.parametrize("D, lengths", [(64, [75]), (64, [30, 1, 3, 0, 22]), (128, [26, 3])])
def test_more_chunks_than_stages(kernels, D, lengths):
    position = [2, 3, 1, 3, 2][: len(lengths)]
    packed = len(lengths) > 1
    Run(kernels, 4, lengths, position=position, D=D, V=D, M=D, gates=0.5, packed=packed).check()


def test_wide_memories_of_long_chunks(kernels):
    Run(kernels, 64, [100], D=72, V=128, M=100, gates=0.01).check()


@pytest.mark.parametrize("chunk, D, V, M", [(16, 128, 128, 128), (32, 72, 64, 20), (64, 64, 128, 100)])
def test_wide_memories(kernels, chunk, D, V, M):
    Run(kernels, chunk, [40], D=D, V=V, M=M, H=2, gates=None).check()


@pytest.mark.parametrize("gates", [None, 0.1])
def test_wide_memories_resumed_in_a_chunk(kernels, gates):
    Run(kernels, 16, [20, 3, 40], position=[7, 5, 1], D=72, V=40, M=100, gates=gates, packed=True).check()


def test_packed_sequences(kernels):
    Run(kernels, 16, [20, 3, 16, 7, 0], position=[7, 5, 1, 9, 3], D=24, V=40, M=17, H=2, packed=True).check()
    Run(kernels, 33, [50, 0, 10], packed=True).check()


def test_closed_gates(kernels):
    Run(kernels, 16, [40], gates=20.0, phi="silu", f="silu").check()


@pytest.mark.parametrize("chunk, D", [(16, 64), (64, 24)])
def test_separate_kernel_for_reads(kernels, chunk, D):
    Run(kernels, chunk, [70], position=[3], D=D, architecture=80).check()


def test_separate_kernel_for_reads_of_packed_sequences(kernels):
    how = {"position": [7, 5, 1], "D": 24, "V": 40, "M": 17, "H": 2, "packed": True}
    Run(kernels, 16, [20, 0, 16], **how, architecture=80).check()


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("D", [24, 72])
def test_fp16(kernels, D, architecture):
    Run(kernels, 16, [21], position=[3], D=D, dtype=torch.float16, architecture=architecture).check()


@pytest.mark.parametrize("weighted", [False, True])
def test_fp16_with_one_memory(kernels, weighted):
    how = {"phi": "layer_norm", "f": "identity", "memory_count": 1, "weighted": weighted}
    Run(kernels, 16, [21], position=[3], D=24, dtype=torch.float16, **how).check()


# ---- one memory, ttt's -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("f", ["softmax", "identity"])
@pytest.mark.parametrize("phi", MAPS)
def test_one_memory_by_every_map(kernels, phi, f, weighted):
    if weighted and phi == "softmax":
        return  # has no kernel on tensor cores
    how = {"D": 20, "M": 40, "gates": 0.2, "phi": phi, "f": f}
    Run(kernels, 16, [21], position=[3], **how, memory_count=1, weighted=weighted).check()


@pytest.mark.parametrize("f", ["layer_norm", "ln_silu", "l2norm", "l2_silu"])
def test_one_memory_under_a_norm_of_reads(kernels, f):
    """A norm removes almost all influence of a decay, so dg consists mostly of rounding errors."""
    run = Run(kernels, 16, [53], position=[3], gates=0.2, phi="layer_norm", f=f, memory_count=1)
    assert_close({"dg": run.got.pop("dg")}, {"dg": run.want.pop("dg")}, 0.05)
    run.check()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 16, 17, 48, 64])
def test_one_memory_in_every_chunk(kernels, chunk, weighted):
    how = {"gates": 0.05, "phi": "layer_norm", "f": "identity", "weighted": weighted}
    Run(kernels, chunk, [70], position=[chunk // 2] if chunk > 1 else None, **how, memory_count=1).check()


@pytest.mark.parametrize("D, M, chunk", [(8, 20, 16), (72, 128, 16), (128, 64, 40), (20, 100, 64)])
@pytest.mark.parametrize("weighted", [False, True])
def test_one_memory_of_every_width(kernels, D, M, chunk, weighted):
    how = {"gates": None, "phi": "layer_norm", "f": "layer_norm", "memory_count": 1, "weighted": weighted}
    Run(kernels, chunk, [40], D=D, M=M, H=2, **how).check()


@pytest.mark.parametrize("weighted", [False, True])
def test_one_memory_of_packed_sequences(kernels, weighted):
    how = {"D": 24, "M": 17, "H": 2, "packed": True, "phi": "layer_norm", "f": "identity", "memory_count": 1}
    how["weighted"] = weighted
    Run(kernels, 16, [20, 3, 16, 7, 0], position=[7, 5, 1, 9, 3], **how).check()
    Run(kernels, 4, [75, 30, 0, 1], position=[2, 3, 1, 2], **how).check()
    Run(kernels, 33, [50, 0, 10], **how).check()
