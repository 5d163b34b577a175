"""A pytest plugin (Python 3.12): which tests run the lines that the patches beside it change.

`pytest -n 2 -p tests.mutants.reach` writes out/reach/WORKER.json: patch -> names of tests. A line that runs
in another process, or once for all tests and is then remembered, is seen where it runs first or not at all.
"""

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HUNK = re.compile(r"^@@ -(\d+)", re.MULTILINE)
FILE = re.compile(r"^--- a/(.+)$", re.MULTILINE)


def line_of(patch: str) -> tuple[str, int]:
    """The file and line that a patch with one edit changes."""
    file, hunk = FILE.search(patch), HUNK.search(patch)
    assert file and hunk
    before = patch[hunk.end() :].split("\n")[1:]
    return file[1], int(hunk[1]) + next(i for i, line in enumerate(before) if line.startswith("-"))


PATCHES = {path.stem: line_of(path.read_text()) for path in sorted(Path(__file__).parent.glob("*.patch"))}
AT = {(str(ROOT / file), line): patch for patch, (file, line) in PATCHES.items()}
FILES = {file for file, _ in AT}
reached: dict[str, set[str]] = defaultdict(set)
now = ""


def enter(code: CodeType, _offset: int) -> object:
    if os.path.realpath(code.co_filename) in FILES:
        sys.monitoring.set_local_events(sys.monitoring.COVERAGE_ID, code, sys.monitoring.events.LINE)
    return sys.monitoring.DISABLE


def see(code: CodeType, line: int) -> object:
    patch = AT.get((os.path.realpath(code.co_filename), line))
    if patch:
        reached[patch].add(now)
    return sys.monitoring.DISABLE


def pytest_configure() -> None:
    monitor = sys.monitoring
    monitor.use_tool_id(monitor.COVERAGE_ID, "reach")
    monitor.register_callback(monitor.COVERAGE_ID, monitor.events.PY_START, enter)
    monitor.register_callback(monitor.COVERAGE_ID, monitor.events.LINE, see)
    monitor.set_events(monitor.COVERAGE_ID, monitor.events.PY_START)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global now
    now = item.nodeid
    sys.monitoring.restart_events()
    return (yield)


def pytest_sessionfinish() -> None:
    sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)
    to = ROOT / "out" / "reach" / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(json.dumps({patch: sorted(names) for patch, names in reached.items()}))
