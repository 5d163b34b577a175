"""Names a process whose heartbeats stop, before JAX ends the others; JAX's last message names no process.

JAX's heartbeats come from a thread in C++ and decide. Here each process beats from Python, more often, and
process 0 warns of missing beats. The others warn when they cannot reach process 0: if a network is cut, only
their logs are left. Time is counted in looks, so that a process that was itself stopped or held back does not
think the others silent.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import jax

from sbp.compat.processes import KVStore

LOG = logging.getLogger("sbp")
BEATS = "sbp/beats"
ENDED = b"ended"
LOOKS = 20
"""In the time after which JAX takes a process for dead."""
QUIET_LOOKS = 8
"""After which who is not heard is named: JAX takes half of its time at least."""


@dataclass
class LivenessWatch:
    """The heartbeats of other processes, as one process sees them.

    Arguments:
      kv_store: where processes leave values for each other.
      index: of this process.
      where: "host:port" of process 0.
      heartbeat_seconds: the time after which JAX takes a process for dead.
      heard: the last beat of each process, and the look at which it was new.
      looks: the number of looks.
      named_processes: the processes that were named.
    """

    kv_store: KVStore
    index: int
    where: str
    heartbeat_seconds: float
    heard: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    looks: int = 0
    named_processes: set[int] = field(default_factory=set)

    def watch(self, done: threading.Event) -> Sequence[threading.Thread]:
        """Beats and looks in threads of its own, until this process ends.

        Arguments:
          done: is set then.
        """
        work = [self.look_on] if self.index == 0 else [self.beat_on, self.look_on]
        threads = [threading.Thread(target=w, args=(done,), daemon=True, name="sbp silence") for w in work]
        for thread in threads:
            thread.start()
        return threads

    def beat_on(self, done: threading.Event) -> None:
        """Beats again and again; a beat waits while process 0 cannot be reached, which `look_on` notices."""
        count = 0
        while not done.wait(self.heartbeat_seconds / LOOKS):
            count += 1
            with suppress(jax.errors.JaxRuntimeError):
                self.beat(str(count).encode())
                self.heard[0] = str(count).encode(), self.looks
        with suppress(jax.errors.JaxRuntimeError):
            self.beat(ENDED)

    def beat(self, value: bytes) -> None:
        """Leaves a beat."""
        self.kv_store.key_value_set_bytes(f"{BEATS}/{self.index}", value, allow_overwrite=True)

    def look_on(self, done: threading.Event) -> None:
        """Looks for beats again and again, and names the processes without any."""
        while not done.wait(self.heartbeat_seconds / LOOKS):
            self.looks += 1
            if self.index == 0:
                with suppress(jax.errors.JaxRuntimeError):
                    self.hear(self.kv_store.key_value_dir_get_bytes(BEATS))
            for other in self.silent():
                LOG.warning("%s", self.text(other))

    def hear(self, beats: Sequence[tuple[str, bytes]]) -> None:
        """Takes the beats of all processes, by their keys."""
        for key, value in beats:
            other = int(key.rsplit("/", 1)[1])
            if value == ENDED:
                self.heard.pop(other, None)
            elif self.heard.get(other, (b"", 0))[0] != value:
                self.heard[other] = value, self.looks

    def silent(self) -> list[int]:
        """Processes without a beat for a while, each once until it beats again."""
        quiet = {i for i, (_, at) in self.heard.items() if self.looks - at >= QUIET_LOOKS}
        new = sorted(quiet - self.named_processes)
        self.named_processes = quiet
        return new

    def text(self, other: int) -> str:
        """The warning about a silent process."""
        seconds = f"{self.heartbeat_seconds * QUIET_LOOKS / LOOKS:.0f} s"
        if self.index:
            return (
                f"process {self.index} has not reached process 0 at {self.where} for {seconds}: that was "
                f"stopped, its host is gone, or the network between is cut; if that lasts, JAX ends this one"
            )
        return (
            f"process 0 has heard nothing of process {other} for {seconds}: that was stopped or is held up, "
            f"its host is gone, or the network between is cut; if its heartbeats are missing, JAX ends all"
        )
