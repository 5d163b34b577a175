"""A pytest plugin (Python 3.12): which tests run the lines of planted faults, and those that make messages.

`pytest -n 2 -p tests.mutants.reach` writes out/reach/WORKER.json: FILE:LINE -> names of tests. A line that
runs in another process, or once for all tests and is then remembered, is seen where it runs first or not at
all.
"""

import ast
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from types import CodeType

import pytest

from tests.mutants.faults import ROOT, faults

MAKERS = ("Problem", "problem")


def messages() -> Iterator[tuple[str, int]]:
    """Where the library makes a message: file and line."""
    for folder in ("sbp", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MAKERS:
                    yield path.relative_to(ROOT).as_posix(), node.lineno


FAULTS = [*faults()]
PLACES = {*((fault.file, fault.line) for fault in FAULTS), *messages()}
WATCHED = {(str(ROOT / file), line): f"{file}:{line}" for file, line in PLACES}
FILES = {file for file, _ in WATCHED}
reached: dict[str, set[str]] = defaultdict(set)
now = ""


def enter(code: CodeType, _offset: int) -> object:
    if os.path.realpath(code.co_filename) in FILES:
        sys.monitoring.set_local_events(sys.monitoring.COVERAGE_ID, code, sys.monitoring.events.LINE)
    return sys.monitoring.DISABLE


def see(code: CodeType, line: int) -> object:
    place = WATCHED.get((os.path.realpath(code.co_filename), line))
    if place and now:
        reached[place].add(now)
    return sys.monitoring.DISABLE


def pytest_configure() -> None:
    monitor = sys.monitoring
    monitor.use_tool_id(monitor.COVERAGE_ID, "reach")
    monitor.register_callback(monitor.COVERAGE_ID, monitor.events.PY_START, enter)
    monitor.register_callback(monitor.COVERAGE_ID, monitor.events.LINE, see)
    monitor.set_events(monitor.COVERAGE_ID, monitor.events.PY_START)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[pytest.CollectReport]:
    """What a module of tests runs as it is loaded is run by all of its tests."""
    global now
    now = collector.nodeid if isinstance(collector, pytest.Module) else ""
    sys.monitoring.restart_events()
    return (yield)


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
    to.write_text(json.dumps({place: sorted(names) for place, names in reached.items()}))
