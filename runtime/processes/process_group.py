"""The processes of one program, and how they agree before they run it.

Every process runs the user's script, and could plan what it compiles by itself. But a time limit may end a
search, and batches may differ between processes. So process 0 plans and sends its choice, and all processes
compare the lowered programs before any runs. Values go through the key-value store of JAX's coordination
service, which works before any device is used, and waits as long as a search takes.
"""

import functools
import gzip
import hashlib
import json
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import jax

from sbp.compat.errors import is_deadline
from sbp.compat.processes import KVStore, kv_store
from sbp.errors import Problem, ProcessError
from sbp.passes.plan.record import ChoiceRecord, read_record, record_data
from sbp.passes.request import Question
from sbp.runtime.processes.call_order import explain_error
from sbp.runtime.processes.calls import Calls, ask, calls_of, published_history, words_of
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
      meetings: how often all processes have met.
      last_request: the request of the last plan, in words.
      turn: how often this process has asked for the calls of others.
    """

    index: int
    count: int
    kv_store: KVStore
    calls: Calls = field(default_factory=Calls)
    meetings: int = 0
    last_request: tuple[str, ...] = ()
    turn: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process plans for all."""
        return self.index == 0

    # -- one plan

    def tell(self, question: Question, record: ChoiceRecord) -> None:
        """Sends a plan to the others."""
        self.last_request = question.lines
        self._put(f"plan/{question.digest}", {"record": record_data(record)})

    def refuse(self, question: Question, error: Exception) -> None:
        """Tells the others that there is no plan, and why."""
        self._put(f"plan/{question.digest}", {"error": str(error)})

    def hear(self, question: Question) -> ChoiceRecord:
        """The plan of process 0.

        Raises:
          ProcessError: if it found none, or waits itself for this process with another program.
        """
        self.last_request = question.lines
        said = self._get(f"plan/{question.digest}", 0, f"process 0 to plan {question.name}", question)
        if "error" in said:
            raise ProcessError(_refused(question.name, said["error"]))
        return read_record(said["record"])

    # -- one program

    def agree(self, name: str, text: str) -> str:
        """Compares the program of this process with those of all others; gives the digest of its text.

        Arguments:
          name: of the program.
          text: the lowered program.

        Raises:
          ProcessError: if a process is about to run another program; on all of them.
        """
        digest = hashlib.sha256(text.encode()).hexdigest()
        mine = {"name": name, "digest": digest, "lines": [*self.last_request]}
        first, wrong = self._meet("program", f" to compile {name}", mine, _other_programs)
        if wrong:
            raise ProcessError(_differ(first, wrong))
        return digest

    def differing_keys(self, name: str, mine: Mapping[str, str]) -> dict[str, tuple[int, int]]:
        """The keys whose values differ, each with two processes that differ; all wait for all.

        Arguments:
          name: of the program, for messages of those that wait.
          mine: the digests of what this process has.
        """
        found: dict[str, list[int]] = self._meet("alike", f" to place {name}", {**mine}, _differing_keys)
        return {key: (a, b) for key, (a, b) in found.items()}

    def explain_error(self, error: BaseException) -> ProcessError | None:
        """The cause of an error of the runtime, if the processes run different programs."""
        return explain_error(error, self.kv_store, self.index, self.count, self.calls)

    def gather(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, by their numbers; all wait for all.

        Arguments:
          name: of the values, for messages of those that wait.
          value: as JSON can hold it.
        """
        found: list[Any] = self._meet("gathered", f": {name}", value, list)
        return found

    def _meet(self, topic: str, waits: str, mine: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Process 0 combines the values of all processes, and all get the result; all wait for all.

        Arguments:
          waits: what is done, for messages of those that wait.
          mine: the value of this process, as JSON can hold it.
        """
        self.meetings += 1
        at = f"{topic}/{self.meetings}"
        self._put(f"{at}/{self.index}", {"value": mine})
        if self.leads:
            every = [self._get(f"{at}/{p}", p, f"process {p}{waits}")["value"] for p in range(self.count)]
            self._put(f"{at}/all", {"value": combine(every)})
        return self._get(f"{at}/all", 0, f"all processes{waits}")["value"]

    # -- words of a thread beside the program

    def put(self, key: str, value: Mapping[str, Any]) -> None:
        """Leaves a value for a thread of another process."""
        self._put(key, value)

    def wait_for(self, key: str) -> dict[str, Any]:
        """Waits for a value from a thread of another process; if that process dies, JAX ends this one too."""
        while (found := self._look(key, SLICE_SECONDS)) is None:
            pass
        return found

    def forget(self, key: str) -> None:
        """Deletes the values whose keys begin with this; all processes have read them."""
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
        """Waits for a value, and logs now and then that it waits, and for what.

        Arguments:
          whose: the process that leaves it.
          question: the question that it answers, if it is a plan.

        Raises:
          ProcessError: if that process has gone on to another program, so that the value never comes.
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
        """Raises if the other process has begun calls which this one has not."""
        if whose == self.index:
            return
        theirs = published_history(self.kv_store, whose)
        # What was left before a call began is there by now.
        if theirs.count > self.calls.count and self._look(key, 0) is None:
            waits: Sequence[str] = (what, *self.last_request)
            runs = words_of(self.kv_store, theirs.at(theirs.count)[1])
            raise ProcessError(gone_on(self.index, waits, whose, runs))
        self.turn += 1
        ask(self.kv_store, f"{self.index}/{self.turn}")

    def _is_waited_for(self) -> bool:
        """Whether process 0 waits for this process to compile its next program."""
        return self._look(f"program/{self.meetings + 1}/0", 0) is not None


def _refused(name: str, error: str) -> Problem:
    return Problem(
        "process",
        f"{name}, planned by process 0 for all processes",
        error,
        "a plan",
        "process 0 plans, so that all processes run the same program, and it found none",
        "what the error of process 0 says",
    )


def _other_programs(every: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The program of process 0, and those of the processes that have another one."""
    first = every[0]
    return first, {str(p): other for p, other in enumerate(every) if other["digest"] != first["digest"]}


def _differing_keys(every: Sequence[Mapping[str, str]]) -> dict[str, tuple[int, int]]:
    """Each key whose values differ, with the first process that has it, and the first that differs from that.

    >>> _differing_keys([{"a": "x"}, {"a": "x", "b": "y"}, {"a": "z", "b": "y"}])
    {'a': (0, 2)}
    """
    first: dict[str, tuple[int, str]] = {}
    found: dict[str, tuple[int, int]] = {}
    for p, values in enumerate(every):
        for key, value in values.items():
            before, held = first.setdefault(key, (p, value))
            if held != value:
                found.setdefault(key, (before, p))
    return found


def _differ(first: Mapping[str, Any], others: Mapping[str, Mapping[str, Any]]) -> Problem:
    """The problem, with the first line that differs."""
    number, other = next(iter(others.items()))
    pairs = zip([first["name"], *first["lines"]], [other["name"], *other["lines"]], strict=False)
    here, there = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
    many = f"processes {', '.join(others)} have" if len(others) > 1 else f"process {number} has"
    return Problem(
        "process",
        f"{first['name']}: {many} another program than process 0",
        f"{there} in process {number}, {here} in process 0" if here else f"{many} other constants or code",
        "the same program in every process: the same script, versions, options and shapes",
        "their collectives would wait for each other for ever, or add up unrelated values",
        "the shape of the whole batch in every process; no random numbers or host names in what is compiled",
    )


def process_group() -> ProcessGroup | None:
    """The group of this process; None if it is the only one."""
    found = kv_store()
    return None if found is None or jax.process_count() == 1 else _group_of(cast(Hashable, found))


@functools.lru_cache(maxsize=1)
def _group_of(found: Hashable) -> ProcessGroup:
    """One group for as long as the processes are connected: it counts how often they have met."""
    return ProcessGroup(jax.process_index(), jax.process_count(), cast(KVStore, found), calls_of(found))
