"""Reads a TOML file figure by figure, and collects what is wrong with it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from sbp.errors import ArgumentError, Problem
from sbp.hardware.quantities import SECONDS, Quantity, amount

TomlTable: TypeAlias = Mapping[str, Any]
"""A table of a TOML file."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a value must be: a test of it, and the words for what does not pass.

    Arguments:
      test: whether a value is legal.
      legal, why, example: for the message.
    """

    test: Callable[[Any], bool]
    legal: str
    why: str
    example: str


@dataclass
class TomlReader:
    """A file that is being read.

    Arguments:
      where: what is read, for the messages.
      examples: per key, how it is written.
      problems: what is wrong so far.
    """

    where: str
    examples: Mapping[str, str]
    problems: list[Problem] = field(default_factory=list)

    def load(self, path: str | os.PathLike[str], maker: str) -> TomlTable:
        """The file as a table.

        Arguments:
          maker: what writes such a file, for the message.

        Raises:
          ArgumentError: for a file that is not there, and one that is not TOML.
        """
        try:
            return tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:  # what is no TOML is a ValueError, too
            why = "the file cannot be read as TOML"
            raise ArgumentError(Problem("argument", self.where, str(e), "a TOML file", why, maker)) from None

    def wrong(self, at: str, got: str, legal: str, why: str, fix: str) -> None:
        """Notes a problem with what stands at a key."""
        where = f"{self.where}: {at}" if at else self.where
        self.problems.append(Problem("argument", where, got, legal, why, fix))

    def known(self, table: TomlTable, legal: Sequence[str], at: str = "") -> None:
        """Notes the keys that nothing reads: they are misspelt."""
        for key in table:
            if key not in legal:
                near = get_close_matches(key, legal, 1)
                fix = f"did you mean {near[0]!r}?" if near else "leave it out; a remark begins with #"
                self.wrong(at, f"key {key!r}", ", ".join(legal), "nothing reads such a key", fix)

    def has(self, table: TomlTable, keys: Sequence[str], why: str, at: str = "") -> bool:
        """Whether a table has all of some keys; notes those that it has not."""
        missing = [key for key in keys if key not in table]
        if missing:
            fix = "\n         ".join(self.examples[key] for key in missing)
            self.wrong(at, f"no {', '.join(missing)}", f"all of {', '.join(keys)}", why, fix)
        return not missing

    def figure(self, given: object, of: Quantity, at: str) -> float:
        """A figure in its base unit; seconds may be 0, nothing else."""
        found = amount(given, of)
        if found is not None and (found or of is SECONDS):
            return found
        units = ", ".join(u for u in of.units if u[0] in "GTmu")
        number = "from 0 on" if of is SECONDS else "above 0"
        legal = f"{of.words} as a number {number}, or a text with one of the units {units}"
        self.wrong(at, repr(given), legal, f"it is measured in {of.words}", f'"{of.example}"')
        return 1.0

    def figures(self, table: TomlTable, of: Mapping[str, Quantity], at: str = "") -> dict[str, float]:
        """Those figures that a table has."""
        before = f"{at}." if at else ""
        return {k: self.figure(table[k], q, before + k) for k, q in of.items() if k in table}

    def one_of(self, given: object, legal: Sequence[str], at: str, why: str) -> str:
        """A name out of a list; its first one where there is none such."""
        if given in legal:
            return str(given)
        near = get_close_matches(str(given), legal, 1)
        fix = f"did you mean {near[0]!r}?" if near else f'"{legal[0]}"'
        self.wrong(at, repr(given), ", ".join(legal), why, fix)
        return legal[0]

    def value(self, given: object, form: Form, at: str) -> Any:
        """A value as it is; None where it is not of a form."""
        if form.test(given):
            return given
        self.wrong(at, f"{given!r:.80}", form.legal, form.why, form.example)
        return None


def is_text(x: object) -> bool:
    """Whether it is a text of at least one letter."""
    return isinstance(x, str) and bool(x)


def is_count(x: object) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(x, int) and not isinstance(x, bool) and x >= 1


def is_number(x: object) -> bool:
    """Whether it is a number."""
    return isinstance(x, int | float) and not isinstance(x, bool)


def is_tables(x: object) -> bool:
    """Whether it is a list of tables."""
    return isinstance(x, list) and all(isinstance(t, dict) for t in x)


def are_positive(x: object) -> bool:
    """Whether it is a list of at least one positive number."""
    return isinstance(x, list) and bool(x) and all(is_number(n) and n > 0 for n in x)


def are_rising(x: Any) -> bool:
    """Whether it is a list of rising positive numbers."""
    return are_positive(x) and sorted(set(x)) == x
