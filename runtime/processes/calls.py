"""The calls of programs that a process has begun, published for the others.

A call costs a digest of some bytes and nothing else. A thread publishes the calls now and then, and when
somebody asks (runtime/processes/failure_propagation.py), and compares them (runtime/processes/call_order.py).

A process that waits for another one to plan or to compile with it would wait for ever if that one has gone on
to run a program that both compiled before. But all processes call the same programs in the same order. So a
process that has begun more calls than the waiting one has begun another program: this is a proof, and needs
no clock.
"""

import json
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax

from sbp.compat.processes import KVStore
from sbp.runtime.processes.flight_recorder import (
    RING_BYTES,
    History,
    Ring,
    SharedProgram,
    history_of,
    note,
    ring_of,
    write_raised,
    write_words,
)

ASKED = "sbp/asked"
ENDED = "sbp/ended"


@dataclass
class Calls:
    """The calls that this process has begun.

    Arguments:
      count: of calls of programs that all processes run together.
      chain: the digest of all these calls, in their order.
      ring: the last ones.
      programs: in words, by their digests.
      last_answer: the last question that was answered.
      published_count: the number of calls when they were last published; None before that.
      published_digests: the digests of programs whose words were published.
      keep_words: writes the words to a file, if the ring is one.
      fails: writes the exception of this process to a file.
    """

    count: int = 0
    chain: bytes = bytes(8)
    ring: Ring = field(default_factory=lambda: bytearray(RING_BYTES), repr=False)
    programs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    last_answer: bytes = b""
    published_count: int | None = None
    published_digests: set[str] = field(default_factory=set)
    keep_words: Callable[[Mapping[str, tuple[str, ...]]], None] | None = None
    fails: Callable[[str], None] | None = None
    lock: AbstractContextManager[bool] = field(default_factory=threading.Lock, repr=False)

    def keep_in(self, folder: Path, index: int) -> None:
        """Keeps everything in files, for readers after the end of this process."""
        self.ring, self.keep_words = ring_of(folder, index), partial(write_words, folder, index)
        self.fails = partial(write_raised, folder, index)

    def begins(self, program: SharedProgram) -> None:
        """Notes a call."""
        with self.lock:
            if program.digest not in self.programs:
                self.programs[program.digest] = program.words
                if self.keep_words is not None:
                    self.keep_words(self.programs)
            own = bytes.fromhex(program.digest)
            self.count, self.chain = self.count + 1, blake2b(self.chain + own, digest_size=8).digest()
            note(self.ring, self.count, self.chain, own)

    @property
    def latest(self) -> tuple[str, ...]:
        """The program of the last call, in words."""
        recent = self.history.recent
        return self.programs[recent[-1][1]] if recent else ()

    @property
    def history(self) -> History:
        """The history that is published."""
        with self.lock:
            return history_of(self.ring)

    def answer(self, kv_store: KVStore, index: int) -> None:
        """Publishes the calls, if somebody has asked since."""
        with suppress(jax.errors.JaxRuntimeError):  # nobody has, or the service is gone
            asked = kv_store.key_value_try_get_bytes(ASKED)
            if asked != self.last_answer:
                self.say(kv_store, index)
                self.last_answer = asked

    def say(self, kv_store: KVStore, index: int, key: str = "") -> None:
        """Publishes the calls.

        Arguments:
          key: where, if not at the place of this process.
        """
        history = self.history
        with suppress(jax.errors.JaxRuntimeError):
            for digest in {p for _, p in history.recent} - self.published_digests:
                words = json.dumps(self.programs[digest]).encode()
                kv_store.key_value_set_bytes(f"sbp/called/{digest}", words, allow_overwrite=True)
                self.published_digests.add(digest)
            said = json.dumps({"index": index, "count": history.count, "recent": history.recent}).encode()
            kv_store.key_value_set_bytes(key or f"sbp/calls/{index}", said, allow_overwrite=not key)
            self.published_count = history.count


def ask(kv_store: KVStore, question: str) -> None:
    """Asks all processes for their calls; the answers come within about a second.

    Arguments:
      question: a new text each time.
    """
    kv_store.key_value_set_bytes(ASKED, question.encode(), allow_overwrite=True)


def published_history(kv_store: KVStore, index: int) -> History:
    """The calls that a process has begun, as last published."""
    return _heard(kv_store, f"sbp/calls/{index}")[1]


def first_end(kv_store: KVStore) -> tuple[int, History] | None:
    """The first process that came to its end, and its calls; None if none has."""
    index, history = _heard(kv_store, ENDED)
    return None if index is None else (index, history)


def words_of(kv_store: KVStore, digest: str) -> tuple[str, ...]:
    """A program in words, by its digest; none if nobody has published it."""
    with suppress(jax.errors.JaxRuntimeError):
        return tuple(json.loads(kv_store.key_value_try_get_bytes(f"sbp/called/{digest}")))
    return ()


def _heard(kv_store: KVStore, key: str) -> tuple[int | None, History]:
    with suppress(jax.errors.JaxRuntimeError):
        said: dict[str, Any] = json.loads(kv_store.key_value_try_get_bytes(key))
        recent = tuple((str(chain), str(digest)) for chain, digest in said["recent"])
        return int(said["index"]), History(int(said["count"]), recent)
    return None, History()


@lru_cache(maxsize=1)
def calls_of(kv_store: Hashable) -> Calls:
    """One object for as long as the processes are connected."""
    return Calls()
