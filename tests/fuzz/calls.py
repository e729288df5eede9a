"""Random calls of every operator: each call works or is refused with a message that names an argument.

    python tests/fuzz/calls.py [--count 100000] [--seed 0] [--device cuda] [--jobs 2]

Calls are drawn from `girih.ops.describe()`: valid calls of every shape, dtype, layout and option, and the
same calls with one to three spoilt arguments. A call that crashes or hangs is reported by its number, and
`--only NUMBER` repeats the call.
"""

import inspect
import random
import re
import sys
from typing import Any

import torch
from girih import ops
from workers import main

DESCRIPTION = ops.describe()
# Messages of PyTorch's schema checks, before an operator is reached; they name the argument or its number.
SCHEMA = re.compile(r"argument '(\w+)'|(?:argument|parameter) (\w+)|unexpected keyword|missing \d required")


class Draw:
    """One call, drawn from a seed and a number, of the named operator or of any operator."""

    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    widths = (1, 2, 3, 5, 8, 16, 17, 33, 64, 65)
    spoils = (0, 0, 1, 1, 1, 2, 3)  # number of spoilt arguments
    refused = False  # whether the call was refused; set by problem_of()

    def __init__(self, seed: int, number: int, device: str, name: str | None = None):
        self.random = random.Random(f"{seed}:{number}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))
        self.device = device
        self.name = name or self.random.choice(list(DESCRIPTION))
        self.op = DESCRIPTION[self.name]
        stateful = any(t["state"] for t in self.op["tensors"])
        self.step = stateful and self.chance(0.25)
        self.sizes = self.draw_sizes()
        self.dtype = self.random.choice(self.dtypes)
        self.keywords = self.draw_keywords()
        self.spoilt = [self.spoil() for _ in range(self.random.choice(self.spoils))]

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def draw_sizes(self) -> dict[str, int]:
        r = self.random
        sizes = {name: r.choice(self.widths) for name in self.op["sizes"]}
        for name, bound in self.op["sizes"].items():
            if "most" in bound:
                sizes[name] = r.randint(bound["least"], bound["most"])
        sizes |= {
            "B": r.choice([0, 1, 1, 2, 3]),
            "T": r.choice([0, 1, 2, 7, 16, 40, 65, 130]),
            "H": r.choice([1, 2, 3]),
        }
        sizes["HK"], sizes["HQ"] = sizes["H"], sizes["H"] * r.choice([1, 1, 2, 3])
        if "HK" in self.op["sizes"] and self.chance(0.3):  # memories share keys, outputs queries
            sizes["H"] *= r.choice([2, 3])
            sizes["HQ"] = r.choice([sizes["HK"], sizes["H"], 2 * sizes["H"]])
        if self.step:
            sizes["T"] = 1
        sizes["n"] = r.choice([1, 1, 2, 3, 5])
        return sizes

    def shape(self, shapes: str) -> list[int]:
        names = self.random.choice(shapes.split(" or ")).strip("[]").split(", ")
        front = [self.random.choice([1, 2, 5]) for _ in range(2)] if names[0] == "..." else []
        self.front = getattr(self, "front", front)
        values = [self.size(name) for name in names if name != "..."]
        return (self.front if names[0] == "..." else []) + values

    def size(self, name: str) -> int:
        if " * " in name:
            a, b = name.split(" * ")
            return self.sizes[a] * self.sizes[b]
        if " - " in name:
            a, b = name.split(" - ")
            return self.sizes[a] - int(b)
        return self.sizes[name]

    def tensor(self, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Random numbers, sometimes in another layout."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype).to(self.device)
        layout = self.random.random()
        if layout < 0.1 and x.dim() > 1:
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        if layout < 0.2 and x.dim() > 0:
            return torch.stack([x, x], -1)[..., 0]
        if layout < 0.25 and x.numel():
            return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)
        return x

    def draw_keywords(self) -> dict[str, Any]:
        r, keywords = self.random, {}
        packed = "packing" in self.op and not self.step and self.chance(0.3)
        if packed:
            self.sizes["B"] = 1
        self.sizes["N"] = r.choice([1, 2, 4]) if packed else self.sizes.get("B", 1)
        full_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        for tensor in self.op["tensors"]:
            if tensor["state"] or (tensor["optional"] and self.chance(0.3)):
                continue
            dtype = self.dtype if tensor["kind"] == "data" else r.choice([self.dtype, torch.float32])
            x = self.tensor(self.shape(tensor["shapes"]), dtype)
            keywords[tensor["name"]] = -x.abs() if tensor["name"] == "g" else x
        for option in self.op["options"]:
            if option["name"] == "n":
                keywords["n"] = self.sizes["n"]
            elif "default" not in option or self.chance(0.5):
                keywords[option["name"]] = self.option(option)
        if packed:
            # cu_chunks is in chunks
            total = self.sizes["T"] // (keywords["chunk"] if self.op["packing"] == "cu_chunks" else 1)
            cuts = sorted(r.randint(0, total) for _ in range(self.sizes["N"] - 1))
            bounds = [0, *cuts, total]
            if self.chance(0.1):
                r.shuffle(bounds)
            dtype = r.choice([torch.int32, torch.int64])
            keywords[self.op["packing"]] = torch.tensor(bounds, dtype=dtype, device=self.device)
        if any(t["state"] for t in self.op["tensors"]) and (
            self.step or self.chance(0.5) or self.needs_state()
        ):
            keywords["state"] = self.state(full_dtype, keywords.get("chunk") or 1)
        return keywords

    def needs_state(self) -> bool:
        """Whether the operator has no default start, so that `state` is required."""
        return inspect.signature(getattr(ops, self.name)).parameters["state"].default is inspect._empty

    def state(self, full_dtype: torch.dtype, chunk: int) -> Any:
        parts = {}
        places = (0, chunk) if self.chance(0.9) else (-2, 70)
        for tensor in self.op["tensors"]:
            if not tensor["state"]:
                continue
            name = tensor["name"].removeprefix("state_")
            if tensor["kind"] == "position":
                parts[name] = torch.randint(*places, (self.sizes["N"],), generator=self.generator).to(
                    self.device
                )
            elif tensor["optional"] and self.chance(0.5):
                parts[name] = None
            else:
                dtype = self.dtype if tensor["kind"] == "data" else full_dtype
                parts[name] = self.tensor(self.shape(tensor["shapes"]), dtype)
            if tensor["kind"] == "position" and tensor["optional"] and self.chance(0.7):
                parts[name] = None
        return self.state_class()(*parts.values())

    def state_class(self) -> type:
        return inspect.signature(getattr(ops, f"{self.name}_step")).parameters["state"].annotation

    def option(self, option: dict[str, Any]) -> Any:
        r = self.random
        if "words" in option:
            return r.choice(option["words"])
        kind = option["type"].rstrip("?")
        if kind == "bool":
            return self.chance(0.5)
        if kind == "int":
            return r.choice([option["least"], option.get("most", 9), 4, 16]).__int__()
        return r.choice([0.0, 1e-6, 0.3, 1.0])

    def spoil(self) -> str:
        """Replaces one argument by an invalid or unusual value and returns its name."""
        r = self.random
        name = r.choice(list(self.keywords))
        value = self.keywords[name]
        if hasattr(value, "_fields"):
            field = r.choice(value._fields)
            part = getattr(value, field)
            new = None if part is None else self.strange(part)
            self.keywords[name] = r.choice([value._replace(**{field: new}), None, tuple(value), 7, [1]])
        elif isinstance(value, torch.Tensor):
            self.keywords[name] = self.strange(value)
        else:
            wrong = [
                None,
                -1,
                0,
                65,
                10**9,
                2**62,
                -(2**63),
                0.5,
                float("nan"),
                float("inf"),
                "word",
                "",
                [1],
                object(),
            ]
            self.keywords[name] = r.choice(wrong)
        return name

    def strange(self, x: torch.Tensor) -> Any:
        r = self.random
        if not isinstance(x, torch.Tensor) or x.is_meta or x.layout != torch.strided:
            return x  # already spoilt
        changes = [
            lambda: None,
            lambda: [1.0],
            lambda: 3,
            lambda: x.tolist() if x.numel() < 50 else "tensor",
            lambda: x[..., None],
            lambda: x[0] if x.dim() and x.shape[0] else x.flatten(),
            lambda: x.flatten(),
            lambda: x.new_zeros(()),
            lambda: x.new_zeros([s + 1 for s in x.shape]),
            lambda: x.new_zeros([0 for _ in x.shape]),
            lambda: x.new_zeros((*x.shape[:-1], 0)) if x.dim() else x,
            lambda: x.int(),
            lambda: x.bool(),
            lambda: x.to(torch.complex64),
            lambda: x.to(r.choice(self.dtypes)),
            lambda: x.to("meta"),
            lambda: x.to("cpu"),
            lambda: x[:1].expand(x.shape) if x.dim() and x.shape[0] else x,
            lambda: torch._neg_view(x) if x.is_floating_point() else x,
            lambda: x.to_sparse() if x.dim() else x,
            lambda: x.detach().float().requires_grad_(),
            lambda: (
                torch.full_like(x, r.choice([float("nan"), float("inf"), 1e4]))
                if x.is_floating_point()
                else x
            ),
            lambda: torch.empty(x.shape, dtype=x.dtype, device="meta"),
            lambda: x.flip(0) if x.dim() else x,
        ]
        return r.choice(changes)()


def names_of(draw: Draw) -> set[str]:
    """Names that a message may use for the arguments of a call."""
    names = {t["name"] for t in draw.op["tensors"]} | {o["name"] for o in draw.op["options"]}
    return names | set(draw.op["sizes"]) | {"state", draw.op.get("packing", "state"), "device"}


def problem_of(draw: Draw) -> str | None:
    """Runs the call and returns what is wrong with its outcome, or None."""
    form = draw.name + "_step" * draw.step
    differentiate = not draw.step and draw.chance(0.3)
    keywords = dict(draw.keywords)
    leaves = []
    if differentiate:
        for name, x in keywords.items():
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type != "meta":
                keywords[name] = x.detach().requires_grad_()
                leaves.append(keywords[name])
    try:
        result = getattr(ops, form)(**keywords)
        o = result[0] if isinstance(result, tuple) else result
        if leaves and o.requires_grad:
            torch.autograd.grad(
                o.float().sum() if o.device.type != "meta" else o.sum(), leaves, allow_unused=True
            )
        if draw.device == "cuda":
            torch.cuda.synchronize()
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        if "INTERNAL ASSERT" in reason or "CUDA error" in reason:
            return f"{type(error).__name__}: {reason}"
        named = reason.startswith("girih.") and any(re.search(rf"\b{n}\b", reason) for n in names_of(draw))
        draw.refused = bool(named or SCHEMA.search(reason))
        if draw.refused:
            return None
        return f"no argument is named: {type(error).__name__}: {reason}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not draw.spoilt and (o.device.type != draw.device or o.dtype != draw.dtype):
        return f"the output is {o.dtype} on {o.device}"
    return None


def describe_argument(x: Any) -> Any:
    if isinstance(x, tuple):
        return [describe_argument(part) for part in x]
    return list(x.shape) if isinstance(x, torch.Tensor) else x


def attempt(seed: int, number: int, device: str) -> tuple[str, str | None]:
    draw = Draw(seed, number, device)
    arguments = {name: describe_argument(x) for name, x in draw.keywords.items()}
    return f"{draw.name}{'_step' * draw.step} of {arguments}, spoilt {draw.spoilt}", problem_of(draw)


if __name__ == "__main__":
    sys.exit(main(__file__, __doc__, "call", ("device", ["cpu", "cuda"]), attempt))
