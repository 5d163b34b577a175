"""Compiled loops that are stored on disk: never those of other sources."""

import os
import subprocess
import sys
from pathlib import Path

LOOP = """
from sbp.compat.machine_code import compile_loops
from loops.numbers import SCALE
from loops.{module} import Pair


@compile_loops
def difference(pair: Pair) -> float:
    return (pair.a - pair.b) * SCALE
"""
PAIR = "from typing import NamedTuple\n\n\nclass Pair(NamedTuple):\n    {}: float\n    {}: float\n"
RUN = "from loops import loop; print(loop.difference(loop.Pair(3.0, 1.0)))"


def run(folder: Path) -> str:
    """What the loop gives in a process of its own."""
    path = os.pathsep.join([str(folder), *sys.path])
    # Files are written within a second; compiled Python would be taken for up to date.
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_what_is_stored_follows_classes_and_numbers_of_other_modules(tmp_path: Path) -> None:
    package = tmp_path / "loops"
    package.mkdir()
    (package / "__init__.py").touch()
    loop = package / "loop.py"
    loop.write_text(LOOP.format(module="pairs"))
    stamp = loop.stat().st_mtime_ns
    (package / "numbers.py").write_text("SCALE = 1.0\n")
    (package / "pairs.py").write_text(PAIR.format("a", "b"))
    assert run(tmp_path) == "2.0"
    assert [*package.glob("__pycache__/loop.difference-*.nbi")]
    (package / "pairs.py").write_text(PAIR.format("b", "a"))
    assert run(tmp_path) == "-2.0"
    (package / "numbers.py").write_text("SCALE = 4.0\n")
    assert run(tmp_path) == "-8.0"
    (package / "pairs.py").rename(package / "other.py")
    loop.write_text(LOOP.format(module="other"))
    os.utime(loop, ns=(stamp, stamp))  # numba goes by time and size
    assert run(tmp_path) == "-8.0"
