"""Character-level text: what the language model reads and writes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RARE = "\N{REPLACEMENT CHARACTER}"


def read(path: str | None = None) -> str:
    """The text of a file, or CPython's own help (`pydoc_data.topics`: 0.5 million characters of English)."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A character per id; id 0 stands for every character that has no id of its own.

    Arguments:
      characters: those with an id, in the order of their code points.
      size: the number of ids, of which the last ones may be unused.

    >>> vocabulary = Vocabulary.of("banana bar", size=4)
    >>> vocabulary.decode(vocabulary.encode("a nab"))
    'a�nab'
    """

    characters: str
    size: int

    @staticmethod
    def of(text: str, size: int) -> Vocabulary:
        """The vocabulary of the `size - 1` most frequent characters of a text."""
        if size < 2:
            raise ValueError(f"a vocabulary of size {size}: at least 2, one id is for rare characters")
        # Equal counts are ordered by code point, so that equal texts give equal vocabularies.
        frequent = sorted(Counter(text).items(), key=lambda item: (-item[1], item[0]))[: size - 1]
        return Vocabulary("".join(sorted(character for character, _ in frequent)), size)

    def encode(self, text: str) -> NDArray[np.int32]:
        """The ids of a text's characters."""
        known, given = _code_points(self.characters), _code_points(text)
        at = np.minimum(np.searchsorted(known, given), len(known) - 1)
        return np.where(known[at] == given, at + 1, 0).astype(np.int32)

    def decode(self, ids: NDArray[np.integer]) -> str:
        """The text of ids; ids without a character are shown as the replacement character."""
        shown = (RARE + self.characters).ljust(self.size, RARE)
        return "".join(shown[i] for i in ids)


def windows(tokens: NDArray[np.int32], batch: int, length: int, seed: tuple[int, ...]) -> NDArray[np.int32]:
    """`batch` random windows of `length` tokens each; equal seeds give equal windows."""
    if len(tokens) < length:
        raise ValueError(
            f"a text of {len(tokens)} characters has no window of {length}: give a longer text or less --seq"
        )
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, size=batch)
    return tokens[starts[:, None] + np.arange(length)]


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
