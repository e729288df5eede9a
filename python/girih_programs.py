"""The commands `girih-generate` and `girih-train` of an installed package: the C++ programs in girih/bin.

A module of its own: importing girih would import torch, which the programs do not need.
"""

import os
import runpy
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


def run(name: str) -> NoReturn:
    """Run the program that was built for the torch that is installed."""
    (package,) = map(Path, find_spec("girih").submodule_search_locations)
    try:
        folder = runpy.run_path(str(package / "_library.py"))["find_folder"](version("torch")).name
    except ImportError as error:
        sys.exit(f"{name}: {error}")
    program = package / "bin" / folder / name
    if not program.exists():
        sys.exit(f"{name}: {program} is missing; a checkout has it in build/{folder}/bin")
    os.execv(program, [name, *sys.argv[1:]])


def generate() -> NoReturn:
    run("girih-generate")


def train() -> NoReturn:
    run("girih-train")
