"""A pass, and passes one after the other: what the lists of passes (chain.py) are made of."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sbp.passes.explain.internal_errors import raise_internal

In = TypeVar("In")
Out = TypeVar("Out")
Next = TypeVar("Next")


@dataclass(frozen=True)
class Pass(Generic[In, Out]):
    """One pass: its name, what it does, and what must hold of what it gives."""

    name: str
    run: Callable[[In], Out]
    holds: Callable[[Out], None]


@dataclass(frozen=True)
class Chain(Generic[In, Out]):
    """Passes one after the other; each takes what the one before it gives."""

    passes: tuple[Pass[Any, Any], ...]

    def then(self, name: str, run: Callable[[Out], Next], holds: Callable[[Next], None]) -> Chain[In, Next]:
        """The chain with one more pass."""
        return Chain((*self.passes, Pass(name, run, holds)))

    def run(self, given: In, check: bool = False) -> Out:
        """Runs all passes.

        Arguments:
          check: whether the contract of each pass is checked after it.

        Raises:
          InternalError: for what no pass should raise, and with `check`, if one broke its contract.
        """
        at: Any = given
        with collector_paused():
            for p in self.passes:
                try:
                    at = p.run(at)
                    if check:
                        p.holds(at)
                except Exception as e:
                    raise_internal(f"pass {p.name!r}", e)
        out: Out = at
        return out


def chain_of(name: str, run: Callable[[In], Out], holds: Callable[[Out], None]) -> Chain[In, Out]:
    """A chain of one pass."""
    return Chain((Pass(name, run, holds),))


@contextmanager
def collector_paused() -> Iterator[None]:
    """Has Python look for no reference cycles meanwhile.

    Passes make millions of small values without cycles that live until the plan is there; to walk over all
    of them again and again took a third of planning. A thread that ends meanwhile may switch the search on
    again: that costs time, and nothing else.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
