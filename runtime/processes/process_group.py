"""The processes of one program, and what they tell each other before they run it.

Every process runs the user's script, and would plan what the script compiles by itself. But a search may be
ended by a clock, and a batch may differ from process to process: so process 0 plans, tells the others what
it has chosen, and all compare the lowered programs before any runs. Words go through JAX's coordination
service, which is there before any device is used, and waits as long as a search takes.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax

from sbp.compat.errors import is_deadline
from sbp.compat.processes import KVStore, kv_store
from sbp.errors import Problem, ProcessError
from sbp.passes.plan.record import ChoiceRecord, read_record, record_data
from sbp.passes.request import Question
from sbp.runtime.processes.call_order import explained
from sbp.runtime.processes.calls import Calls, ask, begun, calls_of, words_of
from sbp.runtime.processes.messages import gone_on

LOG = logging.getLogger("sbp")

SLICE_SECONDS = 5.0
"""After which a process that waits looks whether what it waits for can still come."""
SAID_AGAIN_SECONDS = 60.0
"""After which it says again that it waits."""


@dataclass
class ProcessGroup:
    """The processes of one program, as one of them sees them.

    Arguments:
      index: of this process.
      count: of processes.
      kv_store: where processes leave values for each other.
      calls: of programs that this process has begun.
      met: how often this process has met the others.
      asked: the last plan's question, in words.
      turn: how often it has asked what others run.
    """

    index: int
    count: int
    kv_store: KVStore
    calls: Calls = field(default_factory=Calls)
    met: int = 0
    asked: tuple[str, ...] = ()
    turn: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process plans for all."""
        return self.index == 0

    # -- one plan

    def tell(self, question: Question, record: ChoiceRecord) -> None:
        """Tells the others what was chosen."""
        self.asked = question.lines
        self._put(f"plan/{question.digest}", {"record": record_data(record)})

    def refuse(self, question: Question, error: Exception) -> None:
        """Tells the others that there is no plan, and why."""
        self._put(f"plan/{question.digest}", {"error": str(error)})

    def hear(self, question: Question) -> ChoiceRecord:
        """What process 0 has chosen.

        Raises:
          ProcessError: if it found nothing, or waits itself for this process with another program.
        """
        self.asked = question.lines
        said = self._get(f"plan/{question.digest}", 0, f"process 0 to plan {question.name}", question)
        if "error" in said:
            raise ProcessError(_refused(question.name, said["error"]))
        return read_record(said["record"])

    # -- one program

    def agree(self, name: str, text: str) -> str:
        """Compares what this process is about to run with what all others are; the digest of the text.

        Arguments:
          name: of the program.
          text: the lowered program.

        Raises:
          ProcessError: if some process is about to run another program; on all of them.
        """
        self.met += 1
        mine = {"name": name, "digest": hashlib.sha256(text.encode()).hexdigest(), "lines": [*self.asked]}
        at = f"program/{self.met}"
        self._put(f"{at}/{self.index}", mine)
        if self.leads:
            others = {
                p: self._get(f"{at}/{p}", p, f"process {p} to compile {name}") for p in range(1, self.count)
            }
            wrong = {str(p): other for p, other in others.items() if other["digest"] != mine["digest"]}
            self._put(f"{at}/said", {"first": mine, "wrong": wrong})
        said = self._get(f"{at}/said", 0, f"all processes to compile {name}")
        if said["wrong"]:
            raise ProcessError(_differ(said["first"], said["wrong"]))
        return str(mine["digest"])

    def differing(self, name: str, mine: Mapping[str, str]) -> dict[str, tuple[int, int]]:
        """What is not the same in all processes that have it: two of them, of each; all wait for all.

        Arguments:
          name: of the program, for who waits.
          mine: the digests of what this process has.
        """
        self.met += 1
        at = f"alike/{self.met}"
        self._put(f"{at}/{self.index}", mine)
        if self.leads:
            first = dict[str, tuple[int, str]]()
            wrong = dict[str, tuple[int, int]]()
            for p in range(self.count):
                for key, found in self._get(f"{at}/{p}", p, f"process {p} to place {name}").items():
                    before, held = first.setdefault(key, (p, found))
                    if held != found:
                        wrong.setdefault(key, (before, p))
            self._put(f"{at}/said", wrong)
        said = self._get(f"{at}/said", 0, f"all processes to place {name}")
        return {key: (int(a), int(b)) for key, (a, b) in said.items()}

    def explained(self, error: BaseException) -> ProcessError | None:
        """Why the runtime has raised an error, if it is that the processes run different programs."""
        return explained(error, self.kv_store, self.index, self.count, self.calls)

    def gathered(self, name: str, value: Any) -> list[Any]:
        """What each process has, by their numbers; all wait for all.

        Arguments:
          name: of what is gathered, for who waits.
          value: what JSON can hold.
        """
        self.met += 1
        at = f"gathered/{self.met}"
        self._put(f"{at}/{self.index}", {"value": value})
        if self.leads:
            every = [self._get(f"{at}/{p}", p, f"process {p}: {name}")["value"] for p in range(self.count)]
            self._put(f"{at}/all", {"values": every})
        return list(self._get(f"{at}/all", 0, f"all processes: {name}")["values"])

    # -- words of a thread beside the program

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Leaves a value for a thread of another process."""
        self._put(key, value)

    def awaited(self, key: str) -> dict[str, Any]:
        """A value that a thread of another process leaves, however long that takes; if that process dies, JAX
        ends this one, too."""
        while (found := self._look(key, SLICE_SECONDS)) is None:
            pass
        return found

    def forget(self, key: str) -> None:
        """Deletes the values whose keys begin so; all processes have read them."""
        self.kv_store.key_value_delete(f"sbp/{key}")

    # -- words

    def _put(self, key: str, value: Mapping[str, Any]) -> None:
        packed = gzip.compress(json.dumps(value).encode(), mtime=0)
        self.kv_store.key_value_set_bytes(f"sbp/{key}", packed, allow_overwrite=True)

    def _look(self, key: str, seconds: float) -> dict[str, Any] | None:
        """A value; None if it does not come in time."""
        try:
            found = self.kv_store.blocking_key_value_get_bytes(f"sbp/{key}", max(1, int(1000 * seconds)))
        except jax.errors.JaxRuntimeError as e:
            if is_deadline(e):
                return None
            raise
        return dict(json.loads(gzip.decompress(found)))

    def _get(self, key: str, whose: int, what: str, question: Question | None = None) -> dict[str, Any]:
        """A value, once it is there; says now and then that it waits, and for what.

        Arguments:
          whose: the process that leaves it.
          question: what is waited for is its answer.

        Raises:
          ProcessError: if that process has gone on to another program, and never comes.
        """
        began = said = time.monotonic()
        while (found := self._look(key, SLICE_SECONDS)) is None:
            now = time.monotonic()
            if now - said >= SAID_AGAIN_SECONDS:
                said = now
                LOG.warning("process %d has waited %.0f s for %s", self.index, now - began, what)
            if question is not None and self._is_waited_for() and self._look(key, 0) is None:
                # Process 0 has another program, and waits for all to have that one: this says so to all.
                self.agree(question.name, "")
            self._check_that_it_comes(key, whose, what)
        return found

    def _check_that_it_comes(self, key: str, whose: int, what: str) -> None:
        """Raises if the process that is waited for has begun calls which this one has not."""
        if whose == self.index:
            return
        theirs = begun(self.kv_store, whose)
        # What was left before a call began is there by now.
        if theirs.count > self.calls.count and self._look(key, 0) is None:
            waits: Sequence[str] = (what, *self.asked)
            runs = words_of(self.kv_store, theirs.at(theirs.count)[1])
            raise ProcessError(gone_on(self.index, waits, whose, runs))
        self.turn += 1
        ask(self.kv_store, f"{self.index}/{self.turn}")

    def _is_waited_for(self) -> bool:
        """Whether process 0 waits for this process to come with its next program."""
        said = self._look(f"program/{self.met + 1}/0", 0)
        return said is not None


def _refused(name: str, error: str) -> Problem:
    return Problem(
        "process",
        f"{name}, planned by process 0 for all processes",
        error,
        "a plan",
        "process 0 plans, so that all processes run the same program, and it found none",
        "what the error of process 0 says",
    )


def _differ(first: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> Problem:
    """What differs, and where."""
    number, other = next(iter(others.items()))
    pairs = zip([first["name"], *first["lines"]], [other["name"], *other["lines"]], strict=False)
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    many = f"processes {', '.join(others)} have" if len(others) > 1 else f"process {number} has"
    got = f"{there} in process {number}, {here} in process 0" if here else f"{many} other constants or code"
    return Problem(
        "process",
        f"{first['name']}: {many} another program than process 0",
        got,
        "the same program in every process: the same script, versions, options and shapes",
        "their collectives would wait for each other for ever, or add up unrelated values",
        "the shape of the whole batch in every process; no random numbers or host names in what is compiled",
    )


def process_group() -> ProcessGroup | None:
    """The team of this process; None where it is the only one."""
    found = kv_store()
    return None if found is None or jax.process_count() == 1 else _group_of(cast(Hashable, found))


@functools.lru_cache(maxsize=1)
def _group_of(found: Hashable) -> ProcessGroup:
    """One for as long as the processes are connected: it counts how often they have met."""
    return ProcessGroup(jax.process_index(), jax.process_count(), cast(KVStore, found), calls_of(found))
