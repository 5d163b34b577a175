"""The exception tree: each message says where, what was given, what is legal, why, and what to try.

    SbpError
      SignatureError      a signature that cannot be written, or does not fit its tensor or placement
      PlacementError      ranks, shape, axes or devices that do not fit
      AnnotationError     annotations that contradict each other or that an op cannot honour
      ArgumentError       arguments of a call that cannot be taken as they are
      DonationError       a donated array used again
      MemoryLimitError    a plan that needs more memory than it may use, or than a device has
      RuleError           a rule that a user registered does not describe its op
      MismatchError       `sbp.verify` found an op whose distributed result differs
      EmbeddingError      keys, ids, features or tables of sparse embeddings that cannot be taken
      NonFiniteError      a result that was to be refused: NaN or infinite; also a `FloatingPointError`
      CheckpointError     a checkpoint that cannot be saved or restored
        DamagedCheckpointError  one step of a folder; another one may be intact
        LeaseError            a folder of checkpoints that another run writes to
      BatchError          a batch that does not come; also a `TimeoutError`
      StoreError          rows on a disk that cannot be written, or are not as they were written
      ExecutableError     a compiled program that cannot be saved, or loaded here
      ProcessError        processes that do not run the same program, or do not come
      InternalError       a fault of this library: see `reproduce`

All are `ValueError`s. One exception carries every problem of its call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

MOST_PLACES = 4
"""Places that are named where one thing is wrong in many."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Arguments:
      kind: which exception it belongs to, a key of `KINDS`.
      where: the user's line, or the path of the argument.
      got: what was given.
      legal: what would be legal.
      why: the reason in one sentence.
      fix: what to try.
    """

    kind: str
    where: str
    got: str
    legal: str
    why: str
    fix: str

    def __str__(self) -> str:
        rows = (("got", self.got), ("legal", self.legal), ("why", self.why), ("try", self.fix))
        return "\n".join([self.where, *(f"  {name:<6} {text}" for name, text in rows if text)])


def _together(same: Sequence[Problem]) -> Problem:
    """Problems that differ in their place only, as those of all leaves under one wrong prefix, as one."""
    if len(same) <= MOST_PLACES:
        return replace(same[0], where="\n".join(p.where for p in same))
    places = [p.where for p in same[: MOST_PLACES - 1]]
    return replace(same[0], where="\n".join([*places, f"and {len(same) - len(places)} more, all alike"]))


class SbpError(ValueError):
    """A program that cannot be compiled or run as written; `problems` holds every reason."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        alike: dict[Problem, list[Problem]] = {}
        for p in problems:
            alike.setdefault(replace(p, where=""), []).append(p)
        shown = [_together(same) for same in alike.values()]
        head = "" if len(shown) == 1 else f"{len(shown)} problems\n"
        super().__init__(head + "\n".join(str(p) for p in shown))

    def __reduce__(self) -> tuple[type[SbpError], tuple[Problem, ...]]:
        """How it comes from a worker to the process that started it: made of its problems, not its text."""
        return type(self), self.problems


class SignatureError(SbpError):
    """A signature that cannot be written, or that does not fit its tensor or placement."""


class PlacementError(SbpError):
    """Ranks, shape, axes or devices that do not fit."""


class AnnotationError(SbpError):
    """Annotations that contradict each other, or that an op cannot honour."""


class ArgumentError(SbpError):
    """Arguments of a call that cannot be taken as they are."""


class DonationError(SbpError):
    """A donated array was passed again; its buffer is gone."""


class MemoryLimitError(SbpError):
    """A plan that needs more memory than `Options(memory_limit=...)` allows, or at rest than a device has; or
    a program for which there was too little when it was compiled or ran."""


class RuleError(SbpError):
    """A registered rule that does not describe its op."""


class MismatchError(SbpError):
    """The distributed program's result differs from one device's."""


class EmbeddingError(SbpError):
    """Keys, ids, features or tables of sparse embeddings that cannot be taken as they are."""


class NonFiniteError(SbpError, FloatingPointError):
    """A result that is NaN or infinite, where `Options(debug_nans=True)`, `jax_debug_nans` or
    `jax_debug_infs` demands that none is."""


class CheckpointError(SbpError):
    """A checkpoint that cannot be saved, or restored as asked."""


class DamagedCheckpointError(CheckpointError):
    """A step of a checkpoint folder is damaged or was pruned."""


class LeaseError(CheckpointError):
    """A folder of checkpoints belongs to another run."""


class BatchError(SbpError, TimeoutError):
    """A batch did not come in the time that it was given."""


class StoreError(SbpError):
    """A store of rows on a disk that cannot be opened or written, or whose bytes have changed."""


class ExecutableError(SbpError):
    """A compiled program that cannot be saved, or that cannot be loaded or run here."""


class ProcessError(SbpError):
    """Processes that do not run the same program, or one that does not come."""


class InternalError(SbpError):
    """A fault of this library, not of your program; `reproduce` writes a program that shows it.

    Arguments:
      program: a function that writes that program; None if it is not known.
    """

    program: Callable[[str, str], str] | None = None
    entry: str = "plan"


def reproduce(path: str | os.PathLike[str], error: BaseException | None = None) -> None:
    """Writes a Python program that shows a fault of this library.

    It has the ops, shapes, signatures and options of the program that failed, and none of its data.

    Arguments:
      path: of the file.
      error: what was raised; None for the error that is being handled, or that an interactive session has
        shown last.

    Raises:
      ArgumentError: if that is no `InternalError`, or one that no program led to.

    >>> try:
    ...     reproduce("fault.py", ValueError("of mine"))
    ... except ArgumentError as e:
    ...     print(str(e).splitlines()[0])
    reproduce('fault.py')
    """
    found = error or sys.exception() or getattr(sys, "last_value", None)
    while found is not None and not isinstance(found, InternalError):
        found = found.__cause__ or found.__context__
    if found is None or found.program is None:
        got = "no error" if error is None else type(error).__name__
        raise ArgumentError(
            Problem(
                "argument",
                f"reproduce({os.fspath(path)!r})",
                got if found is None else "an InternalError without a program",
                "an InternalError of a program: of its plan, its lowering or its call",
                "only then is there a program to write",
                "call it where that error was caught, or in the session that shows it",
            )
        )
    with open(path, "w", encoding="utf-8") as file:
        file.write(found.program(found.entry, str(found)))


KINDS: dict[str, type[SbpError]] = {
    "internal": InternalError,
    "signature": SignatureError,
    "placement": PlacementError,
    "annotation": AnnotationError,
    "argument": ArgumentError,
    "donation": DonationError,
    "memory": MemoryLimitError,
    "rule": RuleError,
    "mismatch": MismatchError,
    "embedding": EmbeddingError,
    "store": StoreError,
    "nonfinite": NonFiniteError,
    "checkpoint": CheckpointError,
    "damaged": DamagedCheckpointError,
    "lease": LeaseError,
    "batch": BatchError,
    "executable": ExecutableError,
    "process": ProcessError,
}


def raise_all(problems: Iterable[Problem]) -> None:
    """Raises one exception for all `problems`, of their class if they share one; nothing if there is none."""
    found: Sequence[Problem] = tuple(dict.fromkeys(problems))
    if found:
        kinds = {p.kind for p in found}
        raise (KINDS[kinds.pop()] if len(kinds) == 1 else SbpError)(*found)
