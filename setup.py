"""Drives CMake; CMakeLists.txt is the description of the build.

GIRIH_CUDA (AUTO, ON or OFF) and CMAKE_CUDA_ARCHITECTURES in the environment are CMake's options of those
names. In place (`make build`) CMake leaves its results in python/girih; for a wheel the package is what
`cmake --install` puts there, and serves C++ as well: headers, CMake's package, programs.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
# What is shipped beside what CMake installs; the _C of another Python stays behind.
RESULTS = ["_build.py", "_C" + sysconfig.get_config_var("EXT_SUFFIX")]


def cuda() -> str:
    """GIRIH_CUDA with AUTO resolved now: a GPU that has come or gone since the last build counts."""
    choice = os.environ.get("GIRIH_CUDA") or "AUTO"
    if choice != "AUTO":
        return choice
    seen = (
        shutil.which("nvidia-smi")
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    )
    return "ON" if seen else "OFF"


class CMakeBuild(build_ext):
    def run(self):
        build = ROOT / "build" if self.inplace else ROOT / "build" / "wheel"
        tools = Path(sys.executable).parent  # cmake and ninja are wheels, their programs stand beside Python
        path = os.pathsep.join([str(tools), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path}
        configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
        configure += [
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DCMAKE_MAKE_PROGRAM={shutil.which('ninja', path=path)}",
        ]
        configure += [f"-DGIRIH_CUDA={cuda()}", f"-DGIRIH_TESTS={'ON' if self.inplace else 'OFF'}"]
        if architectures := os.environ.get("CMAKE_CUDA_ARCHITECTURES"):
            configure += [f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
        package = build / "girih"
        if not self.inplace:  # girih/lib and girih/bin, beside torch/lib
            configure += ["-DCMAKE_INSTALL_LIBDIR=lib", "-DGIRIH_TORCH_LIBRARIES=$ORIGIN/../../torch/lib"]
            configure += [f"-DGIRIH_PACKAGE={package}"]
        # Configuring takes seconds; ninja does it again by itself when CMakeLists.txt has changed. Another
        # Python or option starts from an empty cache: the old one holds paths of the old.
        configured = build / "configured.txt"
        build.mkdir(parents=True, exist_ok=True)
        if not configured.exists() or configured.read_text() != "\n".join(configure):
            subprocess.run([*configure, "--fresh"], check=True, env=environment)
            configured.write_text("\n".join(configure))
        subprocess.run(["cmake", "--build", str(build)], check=True, env=environment)
        if not self.inplace:
            target = Path(self.build_lib).absolute() / "girih"
            install = ["cmake", "--install", str(build), "--prefix", str(target)]
            subprocess.run(install, check=True, env=environment, stdout=subprocess.DEVNULL)
            for name in RESULTS:
                shutil.copy2(package / name, target / name)

    def get_outputs(self):
        return []


setup(ext_modules=[Extension("girih._C", [])], cmdclass={"build_ext": CMakeBuild})
