"""Drives CMake; CMakeLists.txt is the description of the build.

    build/kernels      libgirih_kernels.so, once for every version of torch; where there are kernels
    build/torch2.15    libgirih.so for one version of torch, programs, C++ tests

In place (`make build`) the libraries are left in python/girih/lib. For a wheel the package is what
`cmake --install` puts there, and serves C++ as well: headers, CMake's package, programs. One wheel serves
every Python and each torch that it was built for.

Environment:
    GIRIH_CUDA                 AUTO, ON or OFF, CMake's option of that name
    CMAKE_CUDA_ARCHITECTURES   CMake's
    GIRIH_WARNINGS             error: a compiler's warning fails the build
    GIRIH_KERNELS              a libgirih_kernels.so that was built before; default: it is built
    GIRIH_TORCHES              for a wheel: folders of packages, each with a torch; default: this Python's
"""

import filecmp
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
TOOLS = Path(sys.executable).parent  # the folder of Python has the cmake and ninja of PyPI
PATH = os.pathsep.join([str(TOOLS), os.environ["PATH"]])


def choice(variable: str, *values: str) -> str:
    """A variable of the environment, by default the first of its values."""
    value = os.environ.get(variable) or values[0]
    if value not in values:
        sys.exit(f"{variable} is {value!r}; expected {' or '.join(filter(None, values))}")
    return value


def use_cuda() -> bool:
    """GIRIH_CUDA with AUTO resolved now: a GPU that has come or gone since the last build counts."""
    cuda = choice("GIRIH_CUDA", "AUTO", "ON", "OFF")
    if cuda != "AUTO":
        return cuda == "ON"
    nvidia_smi = shutil.which("nvidia-smi")
    return nvidia_smi is not None and subprocess.run([nvidia_smi, "-L"], capture_output=True).returncode == 0


def torch_folder() -> Path:
    """The folder of packages with the running Python's torch."""
    return Path(distribution("torch").locate_file("")).resolve()


def torch_minor(packages: Path) -> str:
    """The minor version of the torch in a folder of packages: 2.15."""
    (version,) = [
        line.split("=")[1].strip().strip("\"'")
        for line in (packages / "torch" / "version.py").read_text().splitlines()
        if line.startswith("__version__")
    ]
    return ".".join(version.split(".")[:2])


def run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, "PATH": PATH})


def build(source: Path, tree: Path, *options: str) -> None:
    """Configure and build a tree of CMake.

    Configuring takes seconds; ninja does it again by itself when CMakeLists.txt has changed. Other options,
    another Python or another compiler start from an empty cache.
    """
    configure = ["cmake", "-S", str(source), "-B", str(tree), "-G", "Ninja", *options]
    if choice("GIRIH_WARNINGS", "", "error"):
        configure += ["-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    compilers = [f"{name}={os.environ.get(name, '')}" for name in ("CC", "CXX", "CUDACXX", "CUDAHOSTCXX")]
    # The environment's ninja stands last: one environment goes on with the tree of another while it is there.
    ninja = shutil.which("ninja", path=PATH)
    configured = tree / "configured.txt"
    tree.mkdir(parents=True, exist_ok=True)
    *before, ninja_before = configured.read_text().splitlines() if configured.exists() else [""]
    if before != [*configure, *compilers] or not Path(ninja_before).exists():
        run(*configure, f"-DCMAKE_MAKE_PROGRAM={ninja}", "--fresh")
        configured.write_text("\n".join([*configure, *compilers, ninja]))
    run("cmake", "--build", str(tree))


def find_nvcc() -> str | None:
    """The compiler of the kernels: of the PATH or of this Python's packages, else where CUDA is installed."""
    folders = [PATH, str(torch_folder() / "nvidia" / "cu13" / "bin"), "/usr/local/cuda/bin"]
    return shutil.which("nvcc", path=os.pathsep.join(folders))


def build_kernels(tree: Path, output: Path, *options: str) -> Path:
    """libgirih_kernels.so in the folder `output`."""
    kernels, copied = output / "libgirih_kernels.so", output / "libgirih_kernels.copied"
    if given := os.environ.get("GIRIH_KERNELS"):
        if not Path(given).is_file():
            sys.exit(f"GIRIH_KERNELS is {given!r}; expected a libgirih_kernels.so")
        output.mkdir(parents=True, exist_ok=True)
        copied.touch()
        if not (kernels.exists() and filecmp.cmp(given, kernels, shallow=False)):
            part = kernels.with_suffix(".part")
            shutil.copy(given, part)
            part.replace(kernels)  # processes that have loaded the old file keep it
        return kernels
    if copied.exists():  # the build would take the copy for its own
        kernels.unlink(missing_ok=True)
        copied.unlink()
    options = [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output}", *options]
    if nvcc := find_nvcc():
        options += [f"-DGIRIH_NVCC={nvcc}"]
    if architectures := os.environ.get("CMAKE_CUDA_ARCHITECTURES"):
        options += [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    build(ROOT / "kernels", tree, *options)
    return kernels


class CMakeBuild(build_ext):
    def run(self):
        if self.inplace:
            self.build_in_place()
        else:
            self.build_package(Path(self.build_lib).absolute() / "girih")

    def build_in_place(self) -> None:
        options = self.cuda_options(ROOT / "build", ROOT / "python" / "girih" / "lib")
        tree = ROOT / "build" / f"torch{torch_minor(torch_folder())}"
        build(ROOT, tree, f"-DPython_EXECUTABLE={sys.executable}", *options)

    def build_package(self, package: Path) -> None:
        """girih/lib and girih/bin, beside torch/lib."""
        for folder in ("lib", "bin", "include"):  # of a build before
            shutil.rmtree(package / folder, ignore_errors=True)
        trees = ROOT / "build" / "wheel"
        shared = ["-DGIRIH_PYTHON=OFF", "-DGIRIH_TESTS=OFF", "-DCMAKE_INSTALL_LIBDIR=lib"]
        shared += ["-DGIRIH_TORCH_LIBRARIES=$ORIGIN/../../../torch/lib"]
        shared += ["-DGIRIH_CUDA_LIBRARIES=$ORIGIN/../../../nvidia/cu13/lib"]
        # A quarter of the bytes for a quarter more time: the driver unpacks a kernel when it is first called.
        shared += self.cuda_options(trees, trees / "lib", "-DCMAKE_CUDA_FLAGS=--compress-mode=size")
        folders = os.environ.get("GIRIH_TORCHES", str(torch_folder()))
        if not folders:
            sys.exit("GIRIH_TORCHES is empty; expected folders of packages, each with a torch")
        for packages in map(Path, folders.split(os.pathsep)):
            minor = torch_minor(packages)
            prefixes = f"{packages / 'torch' / 'share' / 'cmake'};{torch_folder() / 'nvidia' / 'cu13'}"
            tree = trees / f"torch{minor}"
            own = [f"-DCMAKE_PREFIX_PATH={prefixes}", f"-DCMAKE_INSTALL_BINDIR=bin/torch{minor}"]
            build(ROOT, tree, *shared, *own)
            run("cmake", "--install", str(tree), "--prefix", str(package), "--strip")

    @staticmethod
    def cuda_options(trees: Path, output: Path, *of_kernels: str) -> list[str]:
        if not use_cuda():
            if os.environ.get("GIRIH_KERNELS"):
                sys.exit("GIRIH_KERNELS: this is a build without kernels; set GIRIH_CUDA=ON to have them")
            return ["-DGIRIH_CUDA=OFF"]
        kernels = build_kernels(trees / "kernels", output, *of_kernels)
        return ["-DGIRIH_CUDA=ON", f"-DGIRIH_KERNELS={kernels}"]

    def get_outputs(self):
        return []


class AnyPythonWheel(bdist_wheel):
    """No library of the package is linked with Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("girih.libgirih", [])],
    cmdclass={"build_ext": CMakeBuild, "bdist_wheel": AnyPythonWheel},
)
