"""A process of a history: it does what it is told, a line of JSON for each command and each answer."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
from typing import Any

from sbp.errors import CheckpointError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.storage import lease
from tests.runtime.checkpoint.histories.contents import LAYOUTS, extra_of, state_of, tag_in
from tests.runtime.checkpoint.histories.faults import Faults
from tests.runtime.checkpoint.histories.planted import PLANTED


class Worker:
    """Saves and restores; a command names one of its methods."""

    def __init__(self, connection: socket.socket) -> None:
        for name in ("sbp", "absl"):  # orbax says there, too, what it raises
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.connection = connection
        self.faults = Faults()
        self.runs: Checkpoints | None = None
        self.loop: threading.Thread | None = None
        self.is_ended = threading.Event()
        self.seen = list[Any]()

    def run(self) -> None:
        """Answers until nobody asks any more."""
        with self.connection.makefile("rw") as lines:
            self._answer(lines, {"pid": os.getpid()})
            for line in lines:
                command = json.loads(line)
                self._answer(lines, self._done(command.pop("do"), command))

    def _answer(self, lines: Any, answer: dict[str, Any]) -> None:
        lines.write(json.dumps(answer) + "\n")
        lines.flush()

    def _done(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"value": getattr(self, name)(**arguments)}
        except CheckpointError as e:
            return {"refused": str(e)}
        except BaseException as e:  # what no user should see
            return {"raw": f"{type(e).__name__}: {e}"}

    # -- commands

    def times(self, wait: float, dead: float) -> None:
        """Seconds of a test for the minutes of a cluster."""
        lease.WAIT_SECONDS, lease.DEAD_SECONDS = wait, dead
        lease.BEAT_SECONDS, lease.LOOK_SECONDS = 0.1, 0.02

    def plant(self, name: str) -> None:
        """Plants a fault into this process."""
        PLANTED[name]()

    def open(self, folder: str, keep: int, keep_every: int | None, job: str | None) -> None:
        """Gives up what was open, and is about to save there."""
        self.close()
        self.runs = Checkpoints(folder, keep, keep_every=keep_every, job=job)
        self.faults.folder = folder

    def prepare(self) -> None:
        """Takes the folder."""
        assert self.runs is not None
        self.runs.prepare()

    def save(self, steps: list[int], tags: list[int], fault: list[Any] | None = None) -> dict[str, Any]:
        """Saves some steps in a row, and waits for the last; how many counted, and what went wrong.

        Arguments:
          fault: what happens at which operation on files, see `Faults`.
        """
        assert self.runs is not None
        done, error = 0, ""
        states = [state_of(tag) for tag in tags]
        self.faults.arm(fault)
        try:
            for i, step in enumerate(steps):
                self.runs.wait()
                done = i
                self.runs.save(states[i], step, extra_of(tags[i]))
            self.runs.wait()
            done = len(steps)
        except CheckpointError as e:
            error = str(e)
        finally:
            count = self.faults.disarm()
        return {"done": done, "error": error, "operations": count}

    def restore(self, step: int | None, layout: str, strict: bool = False) -> int | str:
        """The tag of what is restored."""
        assert self.runs is not None
        like, arguments = LAYOUTS[layout]()
        return tag_in(self.runs.restore(like, step, strict=strict, **arguments), layout)

    def extra(self, step: int | None) -> int | str:
        """The tag of what is beside the state."""
        assert self.runs is not None
        found = self.runs.extra(step)
        wanted = extra_of(int(found["tag"]))
        same = found.keys() == wanted.keys() and list(found.get("rows", ())) == list(wanted.get("rows", ()))
        return int(found["tag"]) if same else f"a mixture: {found}"

    def listed(self) -> list[list[int]]:
        """The steps, and those that were set aside."""
        assert self.runs is not None
        return [self.runs.steps, self.runs.abandoned_steps]

    def close(self) -> None:
        """Lets others have the folder."""
        if self.runs is not None:
            runs, self.runs = self.runs, None
            runs.close()

    # -- a reader beside

    def begin_reading(self, seed: int) -> None:
        """Restores all the time, in a thread."""
        self.seen, self.is_ended = [], threading.Event()
        self.loop = threading.Thread(target=self._read, args=(random.Random(seed),))
        self.loop.start()

    def end_reading(self) -> list[dict[str, Any]]:
        """What was read since then."""
        assert self.loop is not None
        self.is_ended.set()
        self.loop.join()
        return self.seen

    def _read(self, rng: random.Random) -> None:
        while not self.is_ended.wait(0.01):
            layout = rng.choice([*LAYOUTS])
            self.seen.append(self._done("_read_once", {"layout": layout, "is_named": rng.random() < 0.3}))

    def _read_once(self, layout: str, is_named: bool) -> list[Any] | None:
        assert self.runs is not None
        there = self.runs.steps
        if not there:
            return None
        step = random.choice(there) if is_named else None
        return [step, self.restore(step, layout)]
