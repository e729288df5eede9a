"""The shapes at which operators are measured, in one list for all operators, and the peers of each shape.

Letters are those of tests/support/cases.py. A shape of one token (T = 1) is a decoding step. Gates and step
sizes are fp32 beside bf16 data, as in the layers. A peer gets the same tensors.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import cases
from cases import cat_attention, delta_product, gated_rms_norm, gla, gsa, lattice, short_conv, trellis, ttt

DTYPE = torch.bfloat16
IN_FP32 = {"gate", "step", "filter"}  # kinds of arguments


@dataclass(frozen=True)
class Shape:
    case: cases.Case
    sizes: dict
    peers: tuple[str, ...] = ()
    dtype: torch.dtype = DTYPE

    @property
    def op(self):
        return self.case.op

    @property
    def name(self):
        dims = (str(self.sizes[letter]) for letter in "BTHDX" if letter in self.sizes)
        return "x".join(dims) + f"-{self.case.label}"

    @property
    def is_step(self):
        return self.sizes["T"] == 1

    @property
    def measures(self):
        return ("step",) if self.is_step else ("forward", "forward_backward")

    def record(self):
        """The description of the shape in a file of results. A result with another description belongs to
        another shape."""
        data = {name: f"{letters} {kind}" for name, (letters, kind) in self.case.data.items()}
        return {"sizes": self.sizes, "data": data, "options": self.case.options, "dtype": str(self.dtype)}


def make_shape(dims, case, *peers, dtype=DTYPE, **sizes):
    """dims: "B T H D". V is D, and there are as many queries as memories."""
    B, T, H, D = map(int, dims.split())
    n = case.rows_per_token
    known = {"B": B, "T": T, "H": H, "D": D, "Q": H, "V": D, "N": B, "n": n, "R": T * n}
    return Shape(case, known | sizes, peers, dtype)


def slots(M, dtype=""):
    return gsa(f"m{M}{dtype}", "s", "g")


GSA = [
    make_shape("4 4096 16 64", slots(64), "chunk_gsa", M=64),
    make_shape("4 4096 16 64", slots(128), "chunk_gsa", M=128),
    make_shape("4 4096 16 64", slots(64, "-fp16"), M=64, dtype=torch.float16),
    make_shape("1 8192 96 128", slots(64), "chunk_gsa", M=64),
    make_shape("2 16384 16 128", slots(64), "chunk_gsa", M=64),
    make_shape("8 2048 32 256", slots(64), "chunk_gsa", M=64),
    make_shape("8 1024 8 64", slots(64), "chunk_gsa", M=64),
    make_shape("1 65536 4 64", slots(64), "chunk_gsa", M=64),
    make_shape("128 1 16 64", slots(64), "fused_recurrent_gsa", M=64),
]
GLA = [
    make_shape("4 4096 16 64", gla("channel", "BTHD"), "chunk_gla"),
    make_shape("4 4096 16 128", gla("scalar", "BTH"), "chunk_simple_gla"),
    make_shape("128 1 16 64", gla("channel", "BTHD"), "fused_recurrent_gla"),
]
DELTA_PRODUCT = [
    make_shape("4 4096 16 64", delta_product("n1"), "chunk_delta_rule"),
    make_shape("4 4096 16 128", delta_product("n2", n=2), "chunk_gated_delta_product"),
    make_shape("4 4096 16 128", delta_product("n2-gated", n=2, g=True), "chunk_gated_delta_product"),
    make_shape("1 32768 8 128", delta_product("n1-gated", g=True), "chunk_gated_delta_rule"),
    make_shape("8 8192 16 128", delta_product("n1-gated", g=True), "chunk_gated_delta_rule"),
    make_shape("1 8192 96 128", delta_product("n1"), "chunk_delta_rule"),
    make_shape("2 16384 16 128", delta_product("n1"), "chunk_delta_rule"),
    make_shape("4 2048 16 128", delta_product("n1"), "chunk_delta_rule"),
    make_shape("8 2048 32 256", delta_product("n1"), "chunk_delta_rule"),
    make_shape("8 1024 8 64", delta_product("n1"), "chunk_delta_rule"),
    # No peer supports these.
    make_shape("4 4096 16 64", delta_product("n1-vector", vector=True)),
    make_shape("4 4096 16 128", delta_product("n2-vector", n=2, vector=True)),
    make_shape("4 4096 16 64", delta_product("n1-vector-gated", g=True, vector=True)),  # computed in fp32
    make_shape("4 4096 16 64", delta_product("n1-fp32"), dtype=torch.float32),
    make_shape("128 1 16 64", delta_product("n1"), "fused_recurrent_delta_rule"),
]
TRELLIS_DEFAULT = trellis("m64-c16", g=True, chunk=16)
TRELLIS = [
    make_shape("4 4096 16 64", TRELLIS_DEFAULT, "chunk_ttt_linear twice", "girih gsa", "dense sdpa", M=64),
    *(
        make_shape("4 4096 16 64", trellis(f"m64-c16-{phi}", g=True, chunk=16, phi=phi), M=64)
        for phi in ("identity", "silu", "l2norm", "layer_norm", "l2_silu", "softmax")
    ),
    *(make_shape("4 4096 16 64", trellis(f"m64-c{C}", g=True, chunk=C), M=64) for C in (1, 64)),
    make_shape("4 4096 16 128", trellis("m128-c16", g=True, chunk=16), M=128),
    make_shape("4 4096 16 64", trellis("m64-c16-fp32", g=True, chunk=16), M=64, dtype=torch.float32),
    # One chain, and more chains than a card runs at once.
    make_shape("1 4096 1 64", TRELLIS_DEFAULT, M=64),
    make_shape("8 4096 16 64", TRELLIS_DEFAULT, M=64),
    make_shape("1 65536 4 64", TRELLIS_DEFAULT, "dense sdpa", M=64),
    make_shape("128 1 16 64", TRELLIS_DEFAULT, M=64),
]
TTT = [
    make_shape("4 4096 16 64", ttt("m64-c16", chunk=16), "chunk_ttt_linear", M=64),
    make_shape("4 4096 16 64", ttt("m64-c16-weight", weight=True, chunk=16, f="layer_norm"), M=64),
    make_shape("128 1 16 64", ttt("m64-c16", chunk=16), M=64),
]
LATTICE_DEFAULT = lattice("m64-c16", chunk=16)
LATTICE = [
    make_shape("4 4096 16 64", LATTICE_DEFAULT, "chunk_ttt_linear", "girih gsa", "dense sdpa", M=64),
    *(
        make_shape("4 4096 16 64", lattice(f"m64-c16-{objective}", chunk=16, objective=objective), M=64)
        for objective in ("encode", "similarity")
    ),
    make_shape("4 4096 16 64", lattice("m64-c64", chunk=64), M=64),
    make_shape("4 4096 16 128", lattice("m128-c16", chunk=16), M=128),
    # Without tensor cores, token by token.
    *(
        make_shape("4 4096 16 64", lattice(f"m64-c1-{objective}", chunk=1, objective=objective), M=64)
        for objective in ("decode", "similarity")
    ),
    make_shape("4 4096 16 64", lattice("m64-c16-fp32", chunk=16), M=64, dtype=torch.float32),
    make_shape("4 4096 16 128", lattice("m128-c1", chunk=1), M=128),
    make_shape("1 4096 1 64", LATTICE_DEFAULT, M=64),
    make_shape("8 4096 16 64", LATTICE_DEFAULT, M=64),
    make_shape("1 65536 4 64", LATTICE_DEFAULT, "dense sdpa", M=64),
    make_shape("128 1 16 64", LATTICE_DEFAULT, M=64),
]
CAT_PEERS = ("flex_attention", "dense sdpa")
CAT_ATTENTION = [
    make_shape("4 4096 16 128", cat_attention("c16", chunk=16), *CAT_PEERS),
    make_shape("1 16384 16 128", cat_attention("c16", chunk=16), *CAT_PEERS),
    *(make_shape("4 4096 16 128", cat_attention(f"c{C}", chunk=C), *CAT_PEERS) for C in (4, 8, 32, 64)),
    make_shape("4 4096 16 64", cat_attention("c16", chunk=16), *CAT_PEERS),
    make_shape("1 16384 4 128", cat_attention("c16", chunk=16), *CAT_PEERS),
    make_shape("4 4096 16 128", cat_attention("c16-fp32", chunk=16), "dense sdpa", dtype=torch.float32),
]
CONV = short_conv("w4-silu", activation="silu")
SHORT_CONV = [
    Shape(
        CONV,
        {"B": 4, "T": 4096, "X": 2048, "W": 4, "N": 4, "P": 3},
        ("causal_conv1d", "fla causal_conv1d"),
    ),
    Shape(
        CONV,
        {"B": 128, "T": 1, "X": 2048, "W": 4, "N": 128, "P": 3},
        ("causal_conv1d_update", "fla causal_conv1d_update"),
    ),
]
# The heads of a layer, and a hidden size.
NORM_PEERS = ("fla FusedRMSNormGated", "compiled rms_norm")
GATED_RMS_NORM = [
    make_shape("4 4096 16 64", gated_rms_norm("silu", "BTHD"), *NORM_PEERS),
    make_shape("4 4096 16 128", gated_rms_norm("silu", "BTHD"), *NORM_PEERS),
    make_shape("4 4096 16 128", gated_rms_norm("gelu", "BTHD", activation="gelu"), "compiled rms_norm"),
    Shape(gated_rms_norm("silu"), {"B": 4, "T": 4096, "X": 1024}, NORM_PEERS),
]

SHAPES = {
    "gsa": GSA,
    "gla": GLA,
    "delta_product": DELTA_PRODUCT,
    "trellis": TRELLIS,
    "ttt": TTT,
    "lattice": LATTICE,
    "cat_attention": CAT_ATTENTION,
    "short_conv": SHORT_CONV,
    "gated_rms_norm": GATED_RMS_NORM,
}

# Shapes of the README: operator, shape, title. The first peer of the shape is shown beside it.
README_SHAPES = [
    ("gsa", "4x4096x16x64-m64", "`gsa`, 64 slots"),
    ("gsa", "1x65536x4x64-m64", "`gsa`, one long sequence"),
    ("gla", "4x4096x16x64-channel", "`gla`, a gate a channel"),
    ("delta_product", "4x4096x16x64-n1", "`delta_product`: DeltaNet"),
    ("delta_product", "1x32768x8x128-n1-gated", "Gated DeltaNet"),
    ("trellis", "4x4096x16x64-m64-c16", "`trellis`, beside two of fla's `chunk_ttt_linear`"),
    ("lattice", "4x4096x16x64-m64-c16", "`lattice`, beside `chunk_ttt_linear`"),
    ("cat_attention", "1x16384x16x128-c16", "`cat_attention`, beside FlexAttention"),
]
FOUR = {"D": 64, "V": 64, "M": 64}


def widths(width):
    return FOUR | {"D": width, "V": width}


HALF, FULL, DOUBLE = DTYPE, torch.float32, torch.float64

# Calls with different paths, for the table of docs/operators.md: title, case, sizes, dtype. The other
# operators have one path.
CALLS = [
    ("bf16 or fp16", gsa("", "g"), FOUR, HALF),
    ("without g (ABC)", gsa("", "s"), FOUR, HALF),
    ("more than 128 slots", gsa("", "g"), FOUR | {"M": 129}, HALF),
    ("D or V over 512", gsa("", "g"), FOUR | {"D": 513}, HALF),
    ("fp32", gsa("", "g"), FOUR, FULL),
    ("bf16 or fp16, a gate a head or none", gla("", "BTH"), FOUR | {"D": 256}, HALF),
    ("bf16 or fp16, a gate a channel", gla("", "BTHD"), FOUR | {"D": 128}, HALF),
    ("D over 256, a gate a head or none", gla(""), FOUR | {"D": 257}, HALF),
    ("D over 128, a gate a channel", gla("", "BTHD"), FOUR | {"D": 129}, HALF),
    ("V over 512, a gate a channel", gla("", "BTHD"), FOUR | {"V": 513}, HALF),
    ("fp32", gla(""), FOUR, FULL),
    ("bf16 or fp16", delta_product("", n=2), FOUR, HALF),
    (
        "a beta for every channel, without gates",
        delta_product("", vector=True),
        FOUR | {"D": 128, "V": 128},
        HALF,
    ),
    ("a beta for every channel, with gates", delta_product("", g=True, vector=True), FOUR, HALF),
    (
        "a beta for every channel, D over 128",
        delta_product("", vector=True),
        FOUR | {"D": 129, "V": 129},
        HALF,
    ),
    ("a beta for every channel, l2norm_qk", delta_product("", vector=True, l2norm_qk=True), FOUR, HALF),
    ("between_chunks", delta_product("", chunk=16, between_chunks="gelu"), FOUR, HALF),
    ("n over 16", delta_product("", n=17), FOUR, HALF),
    ("n over 64", delta_product("", n=65), FOUR, HALF),
    ("fp32", delta_product(""), FOUR, FULL),
    ("D or V over 256", delta_product(""), FOUR | {"D": 257}, HALF),
    ("all but fp64", short_conv(""), {}, HALF),
    ("up to 8192 wide, all but fp64", gated_rms_norm(""), {}, HALF),
    ("rows over 8192", gated_rms_norm(""), {"X": 8193}, HALF),
    ("bf16 or fp16", trellis("", g=True, chunk=16), FOUR, HALF),
    ("slots, D or V over 128", trellis("", chunk=16), FOUR | {"M": 129}, HALF),
    ("slots, D or V over 256", trellis("", chunk=16), FOUR | {"M": 257}, HALF),
    ("fp32", trellis("", chunk=16), FOUR, FULL),
    ("bf16 or fp16", ttt("", chunk=16), FOUR, HALF),
    ("phi_weight, of phi='softmax'", ttt("", weight=True, chunk=16, phi="softmax"), FOUR, HALF),
    ("slots or D over 128", ttt("", chunk=16), FOUR | {"M": 129}, HALF),
    ("slots or D over 256", ttt("", chunk=16), FOUR | {"M": 257}, HALF),
    ("fp32", ttt("", chunk=16), FOUR, FULL),
    ("bf16 or fp16", lattice("", g=True, chunk=16), FOUR, HALF),
    ("chunks of fewer than 8", lattice("", chunk=4), FOUR, HALF),
    ("normalize=False", lattice("", chunk=1, normalize=False), FOUR, HALF),
    ("a shrinkage", lattice("", chunk=1, shrinkage=0.1), FOUR, HALF),
    ("slots or D over 128", lattice("", chunk=16), FOUR | {"D": 129}, HALF),
    ("fp32", lattice("", chunk=16), FOUR, FULL),
    ("bf16 or fp16", cat_attention("", chunk=16), FOUR, HALF),
    ("D or V over 256", cat_attention("", chunk=16), FOUR | {"D": 257}, HALF),
    ("fp32", cat_attention("", chunk=16), FOUR, FULL),
    ("fp32, D or V over 128", cat_attention("", chunk=16), FOUR | {"D": 129}, FULL),
    ("fp64, any operator", gsa("", "g"), FOUR, DOUBLE),
]

HEADS = {"num_heads": 8, "head_dim": 128}
SLOTS = {"num_heads": 16, "head_dim": 64, "num_slots": 64, "chunk": 16}
# Whole models of 340M to 420M parameters (train_speed.py), by mixer: the options of girih's model in addition
# to width and depth, and the name and options of fla's model.
MIXERS = {
    "gsa": ({"num_heads": 4, "num_slots": 64}, ("GSA", {"num_heads": 4, "num_slots": 64})),
    "attention": ({"num_heads": 8}, None),  # heads of 128, for which SDPA is fastest
    "gated_deltanet": (HEADS | {"expand_v": 1}, ("GatedDeltaNet", HEADS | {"expand_v": 1})),
    "delta_product": (
        HEADS | {"n": 2, "gated": True},
        ("GatedDeltaProduct", HEADS | {"expand_v": 1, "num_householder": 2, "use_forget_gate": True}),
    ),
    # Trellis has five products a mixer where others have four, and a narrower MLP for the same size. The
    # figures of the page are of these layers: Trellis with one projection for q and k, Lattice with a norm.
    "trellis": (SLOTS | {"intermediate_size": 2432, "shared_qk": True}, None),
    "lattice": (SLOTS | {"post_norm": True}, None),
    "cat": ({"num_heads": 8, "chunk": 16}, None),
}


def flops(shape):
    """FLOPs of the recurrence in forward, which no chunk form can avoid.

    gsa: two memories, each written and read once a token. gla: one memory. delta_product: n reads and writes,
    and the read of the output. trellis: two memories, each read for the step, written, and read for the
    output. ttt: one such memory. lattice: the memory against k and against h, the write and the read.
    cat_attention: scores and values of the visible pairs.
    """
    sizes = shape.sizes
    if shape.op == "short_conv":
        return 2 * sizes["B"] * sizes["T"] * sizes["X"] * sizes["W"]
    if shape.op == "gated_rms_norm":
        return 8 * math.prod(sizes[letter] for letter in shape.case.data["x"][0])
    D, V, M = sizes["D"], sizes["V"], sizes.get("M", 0)
    C = shape.case.chunk
    per_token = {
        "gsa": 4 * M * (D + V),
        "gla": 4 * D * V,
        "delta_product": (4 * sizes["n"] + 2) * D * V,
        "trellis": 6 * M * (D + V),
        "ttt": 6 * M * D,
        "lattice": 8 * D * M,
        "cat_attention": (sizes["T"] / C + C) * (D + V),
    }
    return sizes["B"] * sizes["T"] * sizes["H"] * per_token[shape.op]
