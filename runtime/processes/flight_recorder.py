"""The last calls of a process, kept in a file that others can read after the process has died.

Gloo ends a process that receives more than it waits for, in a thread of its own and without Python. So the
calls of a process are kept in a ring of bytes, which under `python -m sbp launch` is a file that the launcher
reads after the end of the process.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sbp.text.json_reader import json_of

RECENT = 128
"""Calls that are remembered: more than a process can be ahead of another one that it exchanges data with."""
_COUNT, _CALL = struct.Struct("<q"), struct.Struct("<8s8s")
RING_BYTES = _COUNT.size + RECENT * _CALL.size

Ring: TypeAlias = bytearray | mmap.mmap
"""The number of calls, and a place for each of the last ones."""


@dataclass(frozen=True, slots=True)
class SharedProgram:
    """A program in which all processes exchange data: none can run it alone.

    Arguments:
      digest: of its text, equal in all processes: 16 hexadecimal digits.
      words: its name, and its arguments.
    """

    digest: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class History:
    """The last calls that a process has begun.

    Arguments:
      count: of all calls.
      recent: for each of the last calls the digest of all calls up to it, and that of its program.
    """

    count: int = 0
    recent: tuple[tuple[str, str], ...] = ()

    def at(self, number: int) -> tuple[str, str]:
        """Both digests of a call, by its number from 1."""
        return self.recent[number - self.count - 1]

    @property
    def call_numbers(self) -> range:
        """The numbers of the calls that are remembered."""
        return range(self.count - len(self.recent) + 1, self.count + 1)

    def parts_from(self, other: History) -> int | None:
        """The first remembered call at which two histories differ; None if there is none.

        >>> one = History(2, (("a", "f"), ("ab", "g")))
        >>> one.parts_from(History(1, (("a", "f"),))), one.parts_from(History(2, (("a", "f"), ("ac", "h"))))
        (None, 2)
        """
        both = range(
            max(self.call_numbers.start, other.call_numbers.start),
            min(self.call_numbers.stop, other.call_numbers.stop),
        )
        return next((n for n in both if self.at(n)[0] != other.at(n)[0]), None)


def note(ring: Ring, number: int, chain: bytes, program: bytes) -> None:
    """Writes a call: the digest of all calls up to it, and that of its program, 8 bytes each."""
    _CALL.pack_into(ring, _COUNT.size + number % RECENT * _CALL.size, chain, program)
    _COUNT.pack_into(ring, 0, number)  # last: whoever reads it finds the call


def history_of(ring: Ring | bytes) -> History:
    """Reads a ring.

    >>> ring = bytearray(RING_BYTES)
    >>> for i in range(1, 4):
    ...     note(ring, i, bytes([i] * 8), bytes([9] * 8))
    >>> history_of(ring).count, history_of(ring).at(2)
    (3, ('0202020202020202', '0909090909090909'))
    """
    (count,) = _COUNT.unpack_from(ring, 0)
    numbers = range(max(1, count - RECENT + 1), count + 1)
    calls = (_CALL.unpack_from(ring, _COUNT.size + n % RECENT * _CALL.size) for n in numbers)
    return History(count, tuple((chain.hex(), program.hex()) for chain, program in calls))


def ring_of(folder: Path, index: int) -> Ring:
    """The ring of a process in the folder of all."""
    file = folder / f"calls{index}"
    file.write_bytes(bytes(RING_BYTES))
    with file.open("r+b") as opened:
        return mmap.mmap(opened.fileno(), RING_BYTES)


def write_words(folder: Path, index: int, words: Mapping[str, tuple[str, ...]]) -> None:
    """Writes the names of the programs of a process, by their digests."""
    (folder / f"words{index}").write_text(json.dumps(words))


def write_raised(folder: Path, index: int, said: str) -> None:
    """Writes the exception of a process, in one line."""
    (folder / f"raised{index}").write_text(said)


def recorded_exception(folder: Path, index: int) -> str:
    """The exception of a process; "" if it wrote none."""
    file = folder / f"raised{index}"
    return file.read_text() if file.exists() else ""


def recorded_calls(folder: Path, index: int) -> tuple[History, dict[str, tuple[str, ...]]]:
    """The calls of a process, and its programs in words; nothing if it wrote nothing."""
    ring, words = folder / f"calls{index}", folder / f"words{index}"
    if not ring.exists() or not words.exists():
        return History(), {}
    named: dict[str, tuple[str, ...]] = {}
    with suppress(ValueError, AttributeError, TypeError):  # it was killed in the middle of a word
        named = {digest: tuple(map(str, said)) for digest, said in json_of(words.read_text()).items()}
    return history_of(ring.read_bytes()), named
