"""Runs cases in processes of their own, so that a case that crashes or hangs costs no other.

A worker process takes one case after another, which pays for the start of JAX once. Where it dies, or takes
too long over a case, the case has failed, and a new worker goes on with the next.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.conformance import harnesses
from tests.conformance.harnesses import FAILED, Case, Result

DEVICES = 8
# After so many cases a worker is replaced: compiled programs are never freed.
CASES_PER_WORKER = 300


def set_environment() -> None:
    """Eight devices and 64-bit types, for a process that has not started JAX's backend."""
    count = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {count}"
    os.environ["JAX_PLATFORMS"] = "cpu"


def serve(channel: Any, log: str, run: Callable[[Case], Result]) -> None:
    """The life of a worker: names come in, results go out."""
    with open(log, "w", encoding="utf-8") as errors:
        os.dup2(errors.fileno(), 2)
    faulthandler.enable()
    cases = {case.name: case for case in harnesses.all_cases()}
    channel.send(None)
    while (name := channel.recv()) is not None:
        channel.send(run(cases[name]))


@dataclass
class Worker:
    """One process, started when it is first needed.

    Arguments:
      seconds: how long one case may take.
      run: what is done with a case.
    """

    seconds: float
    run: Callable[[Case], Result] = harnesses.run_case
    done: int = 0
    process: Any = None
    channel: Any = None
    log: str = field(default_factory=lambda: tempfile.mkstemp(suffix=".log")[1])

    def start(self) -> None:
        """A new process; ready when it has found the cases."""
        context = get_context("spawn")
        self.channel, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.log, self.run), daemon=True)
        self.process.start()
        theirs.close()
        self.channel.recv()
        self.done = 0

    def stop(self) -> None:
        """Ends the process, if there is one."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.channel.close()
            self.process = None

    def close(self) -> None:
        """Ends the process, and removes what it wrote."""
        self.stop()
        Path(self.log).unlink(missing_ok=True)

    def take(self, case: Case) -> Result:
        """The result of one case, whatever happens to the process."""
        if self.process is not None and self.done >= CASES_PER_WORKER:
            self.stop()
        if self.process is None:
            self.start()
        self.channel.send(case.name)
        self.done += 1
        try:
            if self.channel.poll(self.seconds):
                result: Result = self.channel.recv()
                return result
            why = f"hang: no result within {self.seconds:g} s"
        except EOFError:
            self.process.join()
            why = f"crash: the process ended with {self.process.exitcode}: {self.last_words()}"
        self.stop()
        return Result(case.name, case.group, FAILED, seconds=self.seconds, message=why)

    def last_words(self) -> str:
        """The start of the last complaint of the process."""
        text = Path(self.log).read_text(encoding="utf-8", errors="replace")
        at = max(text.rfind("Fatal Python error"), text.rfind("F0000"), text.rfind("Check failed"), 0)
        return text[at : at + 800].strip() or "no message"


def run_all(cases: Sequence[Case], workers: int, seconds: float) -> Iterator[Result]:
    """The results as they come.

    Arguments:
      workers: how many processes share the cases.
      seconds: how long one case may take.
    """
    if workers <= 1:
        yield from _run_some(cases, seconds)
        return
    from queue import Queue

    results: Queue[Result | None] = Queue()
    left = iter(cases)
    lock = threading.Lock()

    def shared() -> Iterator[Case]:
        while True:
            with lock:
                case = next(left, None)
            if case is None:
                return
            yield case

    def work() -> None:
        for result in _run_some(shared(), seconds):
            results.put(result)
        results.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    running = workers
    while running:
        result = results.get()
        if result is None:
            running -= 1
        else:
            yield result


def _run_some(cases: Iterable[Case], seconds: float) -> Iterator[Result]:
    worker = Worker(seconds)
    try:
        for case in cases:
            yield worker.take(case)
    finally:
        worker.close()
