"""Which planted faults does the suite find? `python -m tests.mutants.run [--full]`

First the suite is run once to see which tests reach each fault's line; then each fault is planted into a copy
of the tree, and those tests are run until one fails. Prints a line per fault.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.mutants.faults import ROOT, Fault
from tests.mutants.reach import FAULTS

MOST_SECONDS = 900  # of one fault: a program that hangs is found, too


def pytest_in(tree: Path, *arguments: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, timeout=seconds)


def reaching(tree: Path, *arguments: str) -> dict[str, list[str]]:
    """FILE:LINE -> the tests that run it."""
    pytest_in(tree, "-p", "tests.mutants.reach", *arguments)
    found = defaultdict(list)
    for file in (tree / "out" / "reach").glob("*.json"):
        for place, names in json.loads(file.read_text()).items():
            found[place] += names
    return found


def first_failure(tree: Path, fault: Fault, names: list[str]) -> str:
    """The test that finds the fault, or nothing."""
    asked = tree / "out" / "names.txt"
    asked.write_text("\n".join(names))
    path = tree / fault.file
    before = path.read_text(encoding="utf-8")
    path.write_text(fault.after, encoding="utf-8")
    try:
        done = pytest_in(tree, "-x", f"@{asked}", seconds=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return "(it hangs)"
    finally:
        path.write_text(before, encoding="utf-8")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "" if done.returncode == 0 else f"(exit {done.returncode})"


def copy_to(folder: str) -> Path:
    """A copy of the tree that faults are planted into."""
    left_out = shutil.ignore_patterns(".venv", "out", "__pycache__")
    tree = shutil.copytree(ROOT, Path(folder) / "tree", symlinks=True, ignore=left_out)
    (tree / "out").mkdir()
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full suite, not the default one")
    suite = ["--full"] if parser.parse_args().full else []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_to(folder)
        names = reaching(tree, *suite)
        for fault in FAULTS:
            began, reach = time.perf_counter(), names[f"{fault.file}:{fault.line}"]
            found = first_failure(tree, fault, reach) if reach else ""
            taken = f"{len(reach):5} tests {time.perf_counter() - began:6.0f} s"
            print(f"{fault.name:50} {taken}  {found or 'NOT FOUND'}", flush=True)


if __name__ == "__main__":
    main()
