"""`make check-compilers`: other compilers than the build's take the sources, with warnings as errors.

    libgirih.so, programs, C++ tests   each g++ from 12 and clang++ from 16 on that is installed
    kernels                            the headers of CUDA 12.8 and its ptxas, from PyPI

PyPI has the headers, ptxas and libnvvm of CUDA 12.8, but not its nvcc: the nvcc of the build reads those
headers, and the ptxas of 12.8 assembles what nvcc makes of the kernels for sm_90a, as PTX 8.7.

Options: --compilers g++-13,clang++-16 and --cuda no choose; --jobs.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREES = ROOT / "build" / "compilers"
LEAST = {"g++": 12, "clang++": 16}
CUDA = "12.8"
# A toolkit's files on PyPI, and the version of PTX that its ptxas takes.
PACKAGES = (
    "nvidia-cuda-nvcc-cu12==12.8.93",
    "nvidia-cuda-runtime-cu12==12.8.90",
    "nvidia-cuda-cccl-cu12==12.8.90",
)
PTX = "8.7"


def installed_compilers() -> list[str]:
    names = [name for kind in LEAST for name in (kind, *(f"{kind}-{number}" for number in range(12, 30)))]
    found: dict[Path, str] = {}
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        number = int(subprocess.check_output([path, "-dumpversion"], text=True).split(".")[0])
        if number >= LEAST[name.split("-")[0]]:
            found.setdefault(Path(path).resolve(), name)
    return list(found.values())


def check_compiler(name: str, jobs: int) -> str | None:
    """Compiles and links everything but kernels; returns what the compiler printed where it failed."""
    tree = TREES / name
    kernels = ROOT / "python" / "girih" / "lib" / "libgirih_kernels.so"
    torch = f"torch{'.'.join(version('torch').split('.')[:2])}"
    options = [f"-DCMAKE_CXX_COMPILER={name}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON", "-G", "Ninja"]
    options += [f"-DPython_EXECUTABLE={sys.executable}", f"-DGIRIH_PACKAGE={tree / 'girih'}"]
    options += ["-DGIRIH_CUDA=ON", f"-DGIRIH_KERNELS={kernels}"] if kernels.exists() else ["-DGIRIH_CUDA=OFF"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(tree), *options],
        ["cmake", "--build", str(tree), "--parallel", str(jobs)],
        [str(tree / "tests" / "cpp" / "girih_tests")],
    ):
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(command, env=os.environ | {"PATH": tools}, capture_output=True, text=True)
        if done.returncode:
            return f"{' '.join(command)} ({torch})\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return None


def cuda_toolkit() -> Path:
    """The files of CUDA 12.8 as one folder: include, bin/ptxas."""
    folder = TREES / f"cuda{CUDA}"
    if not (folder / "bin" / "ptxas").exists():
        shutil.rmtree(folder, ignore_errors=True)
        part = TREES / "packages"
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(part),
            *PACKAGES,
        ]
        subprocess.run(command, check=True)
        for package in sorted((part / "nvidia").iterdir()):
            if (package / "include").exists():
                shutil.copytree(package / "include", folder / "include", dirs_exist_ok=True)
        (folder / "bin").mkdir()
        shutil.copy(part / "nvidia" / "cuda_nvcc" / "bin" / "ptxas", folder / "bin" / "ptxas")
    return folder


def check_kernel(command: str, folder: Path, toolkit: Path) -> str | None:
    """One source: nvcc to PTX with the older headers, the older ptxas on it."""
    words = shlex.split(command)
    source = words[-3] if words[-2] == "-o" else words[words.index("-c") + 1]
    ptx = folder / (re.sub(r"\W", "_", str(Path(source).relative_to(ROOT))) + ".ptx")
    left_out = {"-c", "-o", source}
    kept = [word for word in words[1:] if word not in left_out and not word.startswith("--generate-code")]
    kept = [word for word in kept if not word.endswith(".o")]
    nvcc = [words[0], *kept, f"-I{toolkit / 'include'}", "-arch=compute_90a", "-ptx", source, "-o", str(ptx)]
    done = subprocess.run(nvcc, capture_output=True, text=True)
    if done.returncode or "warning" in done.stderr:
        return f"{source}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    ptx.write_text(re.sub(r"^\.version .*$", f".version {PTX}", ptx.read_text(), count=1, flags=re.MULTILINE))
    ptxas = [str(toolkit / "bin" / "ptxas"), "-arch=sm_90a", str(ptx), "-o", "/dev/null"]
    done = subprocess.run(ptxas, capture_output=True, text=True)
    ptx.unlink()
    how = f"ptxas ended by signal {-done.returncode}" if done.returncode < 0 else done.stderr[-2000:]
    return f"{source}\n{how}" if done.returncode else None


def check_cuda(jobs: int) -> list[str]:
    commands = ROOT / "build" / "kernels" / "compile_commands.json"
    if not commands.exists():
        return ["build the kernels first: make build CUDA=ON"]
    sources = [entry for entry in json.loads(commands.read_text()) if entry["file"].endswith(".cu")]
    folder, toolkit = TREES / "ptx", cuda_toolkit()
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        found = list(pool.map(lambda entry: check_kernel(entry["command"], folder, toolkit), sources))
    failed = [problem for problem in found if problem]
    print(f"CUDA {CUDA}: {len(sources)} sources, {len(failed)} failed", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compilers", help="names with commas; those that are installed by default")
    parser.add_argument("--cuda", choices=["yes", "no"], default="yes")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = (
        installed_compilers()
        if options.compilers is None
        else list(filter(None, options.compilers.split(",")))
    )
    failed = [] if names or options.compilers == "" else ["no g++ from 12 or clang++ from 16 on is installed"]
    for name in names:
        problem = check_compiler(name, options.jobs)
        print(f"{name}: {'FAILED' if problem else 'compiles, links, and the C++ tests pass'}", flush=True)
        failed += [problem] if problem else []
    if options.cuda == "yes":
        failed += check_cuda(options.jobs)
    print("\n\n".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
