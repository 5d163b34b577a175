"""Reads a TOML file figure by figure, and collects the mistakes in it.

Figures of a machine as users write them: a number in the base unit, or a text such as "400 Gb/s".
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from sbp.errors import ArgumentError, Problem

_POWERS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {
    **{f"{letter}B": power for letter, power in _POWERS.items()},
    **{f"{letter}iB": 1024.0**power for power, letter in enumerate("KMGTP", 1)},
}


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a figure measures.

    Arguments:
      words: the unit, in words, for messages.
      units: each unit that a text may have, in base units.
      example: how a user writes it.
    """

    words: str
    units: Mapping[str, float]
    example: str


BYTES = Quantity("bytes", _BYTES, "80GB")
RATE = Quantity(
    "bytes per second",
    # Network cards are sold by bits.
    {f"{unit}/s": n for unit, n in _BYTES.items()} | {f"{k}b/s": n / 8 for k, n in _POWERS.items() if k},
    "400 Gb/s",
)
FLOPS = Quantity("FLOP per second", {f"{k}FLOP/s": n for k, n in _POWERS.items()}, "989 TFLOP/s")
SECONDS = Quantity("seconds", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, "10 us")


def amount(given: object, of: Quantity) -> float | None:
    """A figure in the base unit; None if it is negative or not a figure.

    >>> amount("400 Gb/s", RATE), amount(3.35e12, RATE), amount("80 GB", RATE), amount(-1, SECONDS)
    (50000000000.0, 3350000000000.0, None, None)
    """
    if isinstance(given, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*(?:[eE][+-]?\d+)?)\s*([A-Za-z]\S*)\s*", given, re.ASCII)
        scale = None if found is None else of.units.get(found[2])
        # In decimals, so that 5 us is 5e-6.
        return None if found is None or scale is None else float(Decimal(found[1]) * Decimal(repr(scale)))
    if isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        return None
    return float(given)


TomlTable: TypeAlias = Mapping[str, Any]
"""A table of a TOML file."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a value must be: a test, and the words of the message if it fails.

    Arguments:
      test: tells whether a value is legal.
      legal, why, example: for the message.
    """

    test: Callable[[Any], bool]
    legal: str
    why: str
    example: str


@dataclass
class TomlReader:
    """A file that is read, and its mistakes so far.

    Arguments:
      where: the name of the file, for the messages.
      examples: how a user writes each key.
      problems: the mistakes so far.
    """

    where: str
    examples: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def load(self, path: str | os.PathLike[str], maker: str) -> TomlTable:
        """The file as a table.

        Arguments:
          maker: the command that writes such a file, for the message.

        Raises:
          ArgumentError: if the file does not exist, or is not TOML.
        """
        try:
            return tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:  # what is no TOML is a ValueError, too
            why = "the file cannot be read as TOML"
            raise ArgumentError(Problem("argument", self.where, str(e), "a TOML file", why, maker)) from None

    def wrong(self, at: str, got: str, legal: str, why: str, fix: str) -> None:
        """Notes a mistake in the value of a key."""
        where = f"{self.where}: {at}" if at else self.where
        self.problems.append(Problem("argument", where, got, legal, why, fix))

    def check_keys(self, table: TomlTable, legal: Sequence[str], at: str = "") -> None:
        """Notes every key that is not a known one, as it may be misspelt."""
        for key in table:
            if key not in legal:
                near = get_close_matches(key, legal, 1)
                fix = f"did you mean {near[0]!r}?" if near else "leave it out; a remark begins with #"
                self.wrong(at, f"key {key!r}", ", ".join(legal), "nothing reads such a key", fix)

    def has(self, table: TomlTable, keys: Sequence[str], why: str, at: str = "") -> bool:
        """Whether a table has all of some keys; notes the missing ones."""
        missing = [key for key in keys if key not in table]
        if missing:
            fix = "\n         ".join(self.examples[key] for key in missing)
            self.wrong(at, f"no {', '.join(missing)}", f"all of {', '.join(keys)}", why, fix)
        return not missing

    def figure(self, given: object, of: Quantity, at: str) -> float:
        """A figure in its base unit; only seconds may be 0."""
        found = amount(given, of)
        if found is not None and (found or of is SECONDS):
            return found
        units = ", ".join(u for u in of.units if u[0] in "GTmu")
        number = "from 0 on" if of is SECONDS else "above 0"
        legal = f"{of.words} as a number {number}, or a text with one of the units {units}"
        self.wrong(at, repr(given), legal, f"it is measured in {of.words}", f'"{of.example}"')
        return 1.0

    def figures(self, table: TomlTable, of: Mapping[str, Quantity], at: str = "") -> dict[str, float]:
        """The figures that a table has."""
        before = f"{at}." if at else ""
        return {k: self.figure(table[k], q, before + k) for k, q in of.items() if k in table}

    def one_of(self, given: object, legal: Sequence[str], at: str, why: str) -> str:
        """A name from a list; the first name if the value is not in the list."""
        if given in legal:
            return str(given)
        near = get_close_matches(str(given), legal, 1)
        fix = f"did you mean {near[0]!r}?" if near else f'"{legal[0]}"'
        self.wrong(at, repr(given), ", ".join(legal), why, fix)
        return legal[0]

    def value(self, given: object, form: Form, at: str) -> Any:
        """A value of some form; None if it does not have that form."""
        if form.test(given):
            return given
        self.wrong(at, f"{given!r:.80}", form.legal, form.why, form.example)
        return None


def is_text(x: object) -> bool:
    """Whether a value is a text that is not empty."""
    return isinstance(x, str) and bool(x)


def is_count(x: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def is_number(x: object) -> bool:
    """Whether a value is a number."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def is_tables(x: object) -> bool:
    """Whether a value is a list of tables."""
    return isinstance(x, list) and all(isinstance(t, dict) for t in x)


def are_positive(x: object) -> bool:
    """Whether a value is a list of positive numbers that is not empty."""
    return isinstance(x, list) and bool(x) and all(is_number(n) and n > 0 for n in x)


def are_rising(x: Any) -> bool:
    """Whether a value is a list of positive numbers in rising order."""
    return are_positive(x) and sorted(set(x)) == x
