"""The programs of an installed package: what `pip` puts into the path runs those in `girih/bin`."""

import os
import sys
from pathlib import Path
from typing import NoReturn


def run(name: str) -> NoReturn:
    program = Path(__file__).parent / "bin" / name
    if not program.exists():
        sys.exit(f"{name}: {program} is missing; a checkout has it in build/bin")
    os.execv(program, [name, *sys.argv[1:]])


def generate() -> NoReturn:
    run("girih-generate")


def train() -> NoReturn:
    run("girih-train")
