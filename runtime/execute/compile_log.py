"""Logs tracing, planning and compiling, with the reason why a program is built again (logger "sbp")."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sbp.runtime.call.arguments import Abstract
from sbp.runtime.processes.process_group import process_group

LOG = logging.getLogger("sbp")


@dataclass(frozen=True)
class Shapes:
    """The leaves of a call, as far as a build depends on them.

    Arguments:
      paths: a name per leaf.
      avals: shape, dtype and weak type of each.
    """

    paths: tuple[str, ...]
    avals: tuple[Abstract, ...]

    def since(self, before: Shapes) -> str:
        """The difference from earlier shapes, in words.

        >>> import numpy as np
        >>> def of(*shapes): return Shapes(("x", "y"), tuple((s, np.dtype("float32"), False) for s in shapes))
        >>> of((13, 64), (2,)).since(of((16, 64), (2,)))
        'x is float32[13, 64], was float32[16, 64]'
        >>> of((13, 64), (3,)).since(of((16, 64), (2,)))
        'x is float32[13, 64], was float32[16, 64]; y is float32[3], was float32[2]'
        """
        if self.paths != before.paths:
            return f"{len(self.paths)} arrays in another tree, were {len(before.paths)}"
        changed = [
            f"{path} is {words(now)}, was {words(then)}"
            for path, now, then in zip(self.paths, self.avals, before.avals, strict=True)
            if now != then
        ]
        if not changed:
            return "static arguments or settings of JAX are others"
        more = f", and {len(changed) - 2} more" if len(changed) > 2 else ""
        return "; ".join(changed[:2]) + more


def words(a: Abstract) -> str:
    """A shape as text, such as "float32[13, 64]"."""
    shape, dtype, weak = a
    return f"{dtype}{list(shape)}" + (" (a Python number)" if weak else "")


def why_built(now: Shapes, before: Sequence[Shapes]) -> str:
    """Why a program is built, compared with the nearest earlier build."""
    return f", again: {now.since(before[-1])}" if before else ""


def progress_level() -> int:
    """The log level of this process: process 0 logs for all."""
    others = process_group()
    return logging.INFO if others is None or others.leads else logging.DEBUG


@contextmanager
def log_activity(what: str, name: str, more: str = "") -> Iterator[list[object]]:
    """Logs an activity and its seconds; gives a list to which remarks can be added."""
    began = time.monotonic()
    words: list[object] = [more]
    yield words
    seconds = time.monotonic() - began
    LOG.log(progress_level(), "%s: %s in %.2f s%s", name, what, seconds, "".join(map(str, words)))
