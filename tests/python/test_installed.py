"""`cmake --install`, and a program of another project that finds girih there: no Python is in its process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from girih.models import GirihConfig, GirihForCausalLM

BUILD = Path(__file__).parents[2] / "build"
CACHE = BUILD / "CMakeCache.txt"

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(outside LANGUAGES CXX)
set(CMAKE_CXX_STANDARD 20)
find_package(girih REQUIRED)
add_executable(outside main.cpp)
target_link_libraries(outside girih::girih)
"""
PROGRAM = """
#include <girih/girih.h>

#include <iostream>

int main(int, char** argv) {
  const auto q = at::ones({1, 5, 2, 4});
  const auto [o, state] = girih::ops::gla(q, q, q, {});
  auto model = girih::nn::from_pretrained(argv[1]);
  const auto ids = at::arange(7).unsqueeze(0);
  std::cout << o.select(1, -1).sum().item<double>() << ' ' << state.s.sum().item<double>();
  const auto text = model->generate(ids, {.max_new_tokens = 5})[0];
  for (const auto& id : text.unbind()) std::cout << ' ' << id.item<int64_t>();
}
"""


def value_of(name):
    found = re.search(rf"^{name}:\\w+=(.*)$", CACHE.read_text(), re.MULTILINE)
    return found[1] if found else ""


@pytest.mark.skipif(not (BUILD / "cmake_install.cmake").exists(), reason="girih was not built here")
def test_a_program_of_another_project_finds_girih(tmp_path):
    prefix, source, made = (tmp_path / name for name in ("prefix", "source", "made"))
    source.mkdir()
    (source / "CMakeLists.txt").write_text(PROJECT)
    (source / "main.cpp").write_text(PROGRAM)
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    model = GirihForCausalLM(GirihConfig(mixer="delta_product", initializer_range=0.5, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")

    def run(*command):
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        done = subprocess.run(
            [str(part) for part in command], env=os.environ | {"PATH": tools}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    run("cmake", "--install", BUILD, "--prefix", prefix)
    paths = f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"
    # A torch built with CUDA asks for a toolkit.
    names = {"CMAKE_CUDA_COMPILER": "GIRIH_NVCC", "CUDA_TOOLKIT_ROOT_DIR": "CUDA_TOOLKIT_ROOT_DIR"}
    toolkit = [f"-D{name}={value}" for name, own in names.items() if (value := value_of(own))]
    run("cmake", "-G", "Ninja", "-S", source, "-B", made, paths, "-DCMAKE_CXX_FLAGS=-O0", *toolkit)
    run("cmake", "--build", made)
    said = run(made / "outside", tmp_path / "model").split()
    # S = sum of 5 outer products of ones, [4, 4] in 2 heads; o = S^T q / 2.
    assert [float(x) for x in said[:2]] == [5 * 4 / 2 * 4 * 2, 5 * 16 * 2]
    written = model.generate(torch.arange(7)[None], max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert [int(x) for x in said[2:]] == written[0].tolist()
    (library,) = prefix.glob("lib*/libgirih.so")
    for file in (library, made / "outside"):
        assert "libpython" not in run("readelf", "-d", file)
    assert "libpython" not in run("ldd", made / "outside")
