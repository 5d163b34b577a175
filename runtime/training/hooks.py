"""What is kept in a step beside the state: what the user names, where the batches are, and vocabularies.

A vocabulary that a function or an iterator of batches uses is found, since a run that goes on without it
gives trained rows to other keys, and no number says so.
"""

import gc
import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from sbp.compat.untyped import PyTree
from sbp.errors import ArgumentError, CheckpointError
from sbp.runtime.embedding.vocabulary import Vocabulary
from sbp.runtime.processes.process_group import process_group
from sbp.runtime.storage import extras
from sbp.runtime.training import messages
from sbp.runtime.training.batches import Batches, Feed, Stateful

BATCHES, VOCABULARIES = "fit.batches", "fit.vocabularies"
"""The names under which they stand beside what the user keeps."""
MOST_OBJECTS = 20_000
"""That are looked at for vocabularies: functions of batches hold a few."""
_CLOSED = (ModuleType, type, str, bytes, int, float, np.ndarray, jax.Array)
"""What has no vocabulary in it, or is not a feed's own."""


@dataclass(frozen=True)
class Hooks:
    """What a run keeps beside its state.

    Arguments:
      extra: the user's, by name: what has `get_state` and `set_state`, or a tree.
      batches: the batches, if they know where they are.
      vocabularies: that the batches use, and which are not in `extra`.
    """

    extra: MutableMapping[str, Any]
    batches: Stateful | None
    vocabularies: tuple[Vocabulary, ...]

    @property
    def follow_batches(self) -> bool:
        """Whether a batch that is made changes what is kept."""
        return bool(self.extra) or self.batches is not None or bool(self.vocabularies)

    @property
    def version(self) -> tuple[int, ...]:
        """What changes with the vocabularies."""
        found = (*self.vocabularies, *(x for x in self.extra.values() if isinstance(x, Vocabulary)))
        return tuple(v.batches for v in found)

    def state(self) -> dict[str, Any]:
        """All of it as it is now; all processes come here.

        Raises:
          CheckpointError: if the processes do not have the same.
        """
        found = {name: _state_of(x) for name, x in self.extra.items()}
        if self.batches is not None:
            found[BATCHES] = self.batches.get_state()
        if self.vocabularies:
            found[VOCABULARIES] = [v.get_state() for v in self.vocabularies]
        others = process_group()
        if found and others is not None:
            first, *rest = others.gather("what is kept beside the state", _digests(found))
            if differing := [name for name in first if any(one.get(name) != first[name] for one in rest)]:
                raise CheckpointError(messages.extra_differs(differing))
        return found

    def set_state(self, found: Mapping[str, Any]) -> None:
        """Puts all of it where it was; what the step does not have stays as it is.

        Raises:
          CheckpointError: if the step has other vocabularies.
        """
        for name in self.extra:
            if name not in found:
                continue
            if isinstance(self.extra[name], Stateful):
                self.extra[name].set_state(found[name])
            else:
                self.extra[name] = found[name]
        if self.batches is not None and BATCHES in found:
            self.batches.set_state(found[BATCHES])
        saved = found.get(VOCABULARIES, [])
        if len(saved) != len(self.vocabularies):
            raise CheckpointError(messages.other_vocabularies(len(saved), len(self.vocabularies)))
        for vocabulary, state in zip(self.vocabularies, saved, strict=True):
            vocabulary.set_state(state)


def hooks_of(extra: MutableMapping[str, Any] | None, batches: Batches) -> Hooks:
    """What a run keeps beside its state, besides what the user names.

    Raises:
      ArgumentError: for an `extra` that is no dict by names of the user's own; and for a vocabulary in a
        feed, which might read ahead.
    """
    given = {} if extra is None else extra
    if not isinstance(given, MutableMapping) or not all(isinstance(n, str) for n in given):
        raise ArgumentError(messages.extra_form(given))
    if taken := {BATCHES, VOCABULARIES} & {*given}:
        raise ArgumentError(messages.extra_name(min(taken)))
    knows = batches if isinstance(batches, Stateful) and not isinstance(batches, Vocabulary) else None
    named = {id(x) for x in given.values()}
    found = () if knows is not None else vocabularies_in(batches)
    found = tuple(v for v in found if id(v) not in named)
    if found and isinstance(batches, Feed):
        raise ArgumentError(messages.feed_with_vocabulary(found[0].name))
    return Hooks(given, knows, found)


def vocabularies_in(root: object) -> tuple[Vocabulary, ...]:
    """The vocabularies that can be reached from the batches of a run: by closures, attributes and containers.

    >>> words = Vocabulary(3)
    >>> vocabularies_in(lambda i: words.lookup([i]).rows) == (words,)
    True
    """
    found, seen, left = list[Vocabulary](), {id(root)}, deque([root])
    while left and len(seen) < MOST_OBJECTS:
        x = left.popleft()
        if isinstance(x, Vocabulary):
            found.append(x)
            continue
        for inner in _held_by(x):
            if id(inner) not in seen and not isinstance(inner, _CLOSED):
                seen.add(id(inner))
                left.append(inner)
    return tuple(found)


# -- inside


def _held_by(x: object) -> Iterable[object]:
    """What an object holds; of a function what it uses: closure, defaults, and globals by their names."""
    if isinstance(x, MethodType):
        return (x.__self__, x.__func__)
    if isinstance(x, FunctionType):
        cells = (_content(cell) for cell in x.__closure__ or ())
        names = {*_names(x.__code__)}
        own = (value for name, value in x.__globals__.items() if name in names)
        return (*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *own)
    return gc.get_referents(x)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: CodeType) -> Iterator[str]:
    """The globals that a function names, and the functions in it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _state_of(x: object) -> PyTree:
    return x.get_state() if isinstance(x, Stateful) else x


def _digests(found: Mapping[str, Any]) -> dict[str, str]:
    def digest(x: PyTree) -> str:
        content, file = extras.encode(x)
        return hashlib.sha256(json.dumps(content).encode() + file).hexdigest()

    return {name: digest(x) for name, x in found.items()}
