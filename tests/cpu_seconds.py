"""What tests take, in seconds of processors: those of a test, of what it starts and waits for, of all.

The clock on the wall depends on what else the machine does; these hardly do. The sum is printed at the end of
each run; `--cpu-seconds` prints folders and the costliest tests.
"""

import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COSTLIEST = 40


def used() -> float:
    """Processor seconds of this process and of those that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class CpuSeconds:
    """Measures in each worker; adds up where the summary is printed."""

    def __init__(self, table: bool) -> None:
        self.table, self.begun = table, 0.0
        self.of_test: dict[str, float] = {}
        self.of_workers: list[float] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        self.begun = used()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            report.user_properties.append(("cpu_seconds", used() - self.begun))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.of_test[report.nodeid] = dict(report.user_properties)["cpu_seconds"]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if "PYTEST_XDIST_WORKER" in os.environ:
            vars(session.config)["workeroutput"]["cpu_seconds"] = used()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.of_workers.append(getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        whole = sum(self.of_workers) + time.process_time()
        if not self.of_workers:
            whole = used()
        write = terminalreporter.write_line
        if self.table:
            folders: dict[str, list[float]] = defaultdict(list)
            for name, seconds in self.of_test.items():
                folders[Path(name.split("::")[0]).parent.as_posix()].append(seconds)
            write("\nCPU seconds by folder")
            for folder, each in sorted(folders.items(), key=lambda item: -sum(item[1])):
                write(f"{sum(each):8.1f}  {len(each):5} tests  {folder}")
            write("the costliest tests")
            for name in sorted(self.of_test, key=self.of_test.__getitem__, reverse=True)[:COSTLIEST]:
                write(f"{self.of_test[name]:8.1f}  {name}")
        write(f"{whole:.0f} CPU s, of which tests {sum(self.of_test.values()):.0f}")
