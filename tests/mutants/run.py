"""Which planted faults does the suite find? `python -m tests.mutants.run [--full]`

First the suite is run once to see which tests reach each fault's line; then each fault is planted into a copy
of the tree, and those tests are run until one fails. Prints a line per fault.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from tests.mutants.reach import PATCHES, ROOT

MOST_SECONDS = 900  # of one fault: a program that hangs is found, too


def pytest_in(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", *arguments]
    return subprocess.run(
        command, cwd=tree, capture_output=True, text=True, check=False, timeout=MOST_SECONDS
    )


def reaching(tree: Path, *arguments: str) -> dict[str, list[str]]:
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "tests.mutants.reach", *arguments]
    subprocess.run(command, cwd=tree, capture_output=True, check=False)
    found = defaultdict(list)
    for file in (tree / "out" / "reach").glob("*.json"):
        for patch, names in json.loads(file.read_text()).items():
            found[patch] += names
    return found


def first_failure(tree: Path, patch: str, names: list[str], *arguments: str) -> str:
    """The test that finds the fault, or nothing."""
    subprocess.run(["git", "apply", f"tests/mutants/{patch}.patch"], cwd=tree, check=True)
    try:
        # By file where they are many: a command line has an end.
        asked = names if len(names) < 500 else sorted({name.split("::")[0] for name in names})
        done = pytest_in(tree, "-x", *arguments, *asked)
    except subprocess.TimeoutExpired:
        return "(it hangs)"
    finally:
        subprocess.run(["git", "apply", "-R", f"tests/mutants/{patch}.patch"], cwd=tree, check=True)
    failed = [
        line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    return failed[0] if failed else "" if done.returncode == 0 else f"(exit {done.returncode})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full suite, not the default one")
    suite = ["--full"] if parser.parse_args().full else []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".venv", "out", "__pycache__")
        )
        names = reaching(tree, *suite)
        for patch in PATCHES:
            began = time.perf_counter()
            found = first_failure(tree, patch, names[patch], *suite) if names[patch] else ""
            seconds = time.perf_counter() - began
            print(
                f"{patch:60} {len(names[patch]):5} tests {seconds:6.0f} s  {found or 'NOT FOUND'}", flush=True
            )


if __name__ == "__main__":
    main()
