import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_package_ships_the_extension_of_its_own_python_alone(tmp_path):
    own = "_C" + sysconfig.get_config_var("EXT_SUFFIX")
    files = ["__init__.py", "_build.py", "lib/libgirih.so", own, "_C.cpython-399-x86_64-linux-gnu.so"]
    for name in files:
        file = tmp_path / "python" / "girih" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.25)\nproject(empty NONE)\n")
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", "built"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    built = tmp_path / "built"
    assert sorted(str(p.relative_to(built / "girih")) for p in built.rglob("*") if p.is_file()) == sorted(
        files[:-1]
    )
