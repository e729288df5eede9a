"""A short check of all parts of girih, in any environment: `make smoke`, or `python tests/smoke.py` with an
installed package. Needs torch, transformers, cmake, ninja and a C++ compiler, and no pytest.

The checks cover every operator (forward, backward, one token at a time), a training step of every mixer,
torch.compile, the program girih-generate, and a C++ program that uses `find_package(girih)`. The script
prints one line a check and a last line with the versions. The exit code is 1 if a check fails.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import girih
import torch
import transformers
from girih import _library
from girih.models import MIXERS, GirihConfig, GirihForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from cases import ONE_EACH, gradients, operator, recurrence, start, step
from comparison import assert_within

PACKAGE = Path(girih.__file__).parent
IN_CHECKOUT = PACKAGE == ROOT / "python" / "girih"
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
PROMPT = "giri\u1e2b"  # the last letter has three bytes


def run(*command: object) -> str:
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(part) for part in command], env=os.environ | {"PATH": tools}, capture_output=True
    )
    printed = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, f"{command[0]}: {printed[-2000:]}"
    return done.stdout.decode(errors="replace")


def check_operators() -> str:
    """Outputs, states and gradients of the operators equal those of their recurrences in float64."""
    for case in ONE_EACH:
        for device in DEVICES:
            dtype, tolerance = (torch.float64, 1e-9) if device == "cpu" else (torch.float32, 1e-3)
            inputs = case.draw(13, calm=True, dtype=dtype, device=device).requiring_grad()
            exact = inputs.map(lambda x: x.detach().double()).requiring_grad()
            outs, want = operator(inputs), recurrence(exact)
            assert_within(outs, want, tolerance)
            assert_within(gradients(outs, inputs), gradients(want, exact), 10 * tolerance)
    return f"{len(ONE_EACH)} operators"


def check_steps() -> str:
    """X_step of one token equals X of one token."""
    found = [case for case in ONE_EACH if case.has_state]
    for case in found:
        inputs = case.draw(1, dtype=torch.float32)
        with torch.no_grad():
            want = operator(inputs)["o"]
            state = start(inputs)
            fields = {name: x for name, x in zip(type(state)._fields, state, strict=True) if x is not None}
            assert_within({"o": step(replace(inputs, state_fields=fields))}, {"o": want.double()}, 1e-4)
    return f"{len(found)} operators"


def small_model(mixer: str) -> GirihForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2}
    return GirihForCausalLM(GirihConfig(mixer=mixer, initializer_range=0.5, **sizes))


def check_training() -> str:
    """The loss of a text falls in a training step."""
    for mixer in MIXERS:
        for device in DEVICES:
            model = small_model(mixer).to(device)
            ids = torch.randint(256, (2, 40), device=device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses = []
            for _ in range(2):
                loss = model(input_ids=ids, labels=ids).loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[1] < losses[0], f"{mixer} on {device}: {losses}"
    return f"{len(MIXERS)} mixers"


def check_compile() -> str:
    """torch.compile with fullgraph=True gives the eager result of each operator."""
    for case in ONE_EACH:
        torch.compiler.reset()
        inputs = case.draw(9, calm=True)
        compiled = torch.compile(lambda each=inputs: operator(each), backend="aot_eager", fullgraph=True)
        assert_within(compiled(), operator(inputs), 1e-12)
    return f"{len(ONE_EACH)} operators"


def generate_in_python(folder: Path) -> str:
    """The text of the model in Python, up to 100 new bytes."""
    model = GirihForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([list(PROMPT.encode())])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, max_new_tokens=100, do_sample=False)
    return bytes(text[0].tolist()).decode(errors="replace") + "\n"


def check_program(folder: Path) -> str:
    """girih-generate prints the text of Python."""
    own = Path(sys.executable).parent
    program = (ROOT / "build" / _library.loaded.name / "bin" if IN_CHECKOUT else own) / "girih-generate"
    text = run(program, folder, PROMPT, "--max-new-tokens", 100)
    assert text == generate_in_python(folder), text
    return str(program)


def check_cpp(folder: Path) -> str:
    """A program of another project finds the installed girih, and prints the text of Python."""
    prefix = PACKAGE
    if IN_CHECKOUT:
        prefix = folder / "prefix"
        run("cmake", "--install", ROOT / "build" / _library.loaded.name, "--prefix", prefix)
    source = folder / "source"
    shutil.copytree(ROOT / "examples" / "complete", source)
    options = [f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_FLAGS=-O0", "-G", "Ninja"]
    run("cmake", "-S", source, "-B", folder / "program", *options)
    run("cmake", "--build", folder / "program")
    text = run(folder / "program" / "complete", folder, PROMPT)
    assert text == generate_in_python(folder), text
    return f"find_package(girih) in {prefix if not IN_CHECKOUT else 'cmake --install'}"


def main() -> int:
    failed, start_time = [], time.monotonic()

    def check(name: str, function: Callable[..., str], *arguments: object) -> None:
        since = time.monotonic()
        try:
            found = function(*arguments)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            found = "FAILED"
        print(f"{name:<10}{time.monotonic() - since:6.1f} s  {found}", flush=True)

    torch.set_num_threads(1)
    check("operators", check_operators)
    check("steps", check_steps)
    check("training", check_training)
    check("compile", check_compile)
    with tempfile.TemporaryDirectory() as folder:
        small_model("delta_product").save_pretrained(folder)
        check("program", check_program, Path(folder))
        check("C++", check_cpp, Path(folder))
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    versions += f", Python {sys.version.split()[0]}, {'checkout' if IN_CHECKOUT else 'installed package'}"
    print(f"{versions}: {f'FAILED {failed}' if failed else 'passed'}, {time.monotonic() - start_time:.0f} s")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
