"""Host arrays that every process gives whole: that all give the same is looked at when they are first placed.

`jax.device_put` compares every host array with those of all other processes each time it puts one on their
devices: a batch per step goes to all. Here each process tells its digest, once per argument of a program.
That finds what is wrong every time, such as rows of their own in each process; then nothing is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from sbp.compat.core import is_key
from sbp.compat.untyped import Leaf
from sbp.errors import ArgumentError, Problem
from sbp.runtime.processes.process_group import ProcessGroup


@dataclass
class HostInputCheck:
    """The arguments of a program that were compared.

    Arguments:
      known: their positions.
      many: whether there are other processes; None before the first arguments are placed.
    """

    known: set[int] = field(default_factory=set)
    many: bool | None = None

    def lacks(self, positions: Iterable[int]) -> bool:
        """Whether some arguments are to be compared, or the first ones are placed."""
        return self.many is None or (self.many and not self.known.issuperset(positions))

    def check(
        self,
        process_group: ProcessGroup | None,
        name: str,
        paths: Sequence[str],
        given: Sequence[tuple[Leaf, bool]],
    ) -> None:
        """Compares the host arrays of all processes, of arguments that were not compared before; all
        processes come here when they first place arguments of a program.

        Arguments:
          team: the processes; None where there is one.
          name: of the program.
          paths: names of its arguments.
          given: the arguments, and whether this process has devices that they lie on.

        Raises:
          ArgumentError: if some differ, on all processes.
        """
        first, self.many = self.many is None, process_group is not None
        if process_group is None:
            return
        new = [i for i, (x, _) in enumerate(given) if i not in self.known and is_of_host(x)]
        if not first and not new:
            return
        self.known.update(new)
        differs = process_group.differing(name, {str(i): digest(given[i][0]) for i in new if given[i][1]})
        if differs:
            raise ArgumentError(*(_not_alike(name, paths[int(i)], *two) for i, two in differs.items()))


def is_of_host(x: Leaf) -> bool:
    """Whether a process has all of an array, of which the others have their own, alike."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def digest(x: Leaf) -> str:
    """Of the bytes of a host array.

    >>> digest(np.arange(6).reshape(2, 3).T) == digest(np.array([[0, 3], [1, 4], [2, 5]]))
    True
    """
    held = np.asarray(jax.random.key_data(x) if isinstance(x, jax.Array) and is_key(x.dtype) else x)
    return hashlib.sha256(np.ascontiguousarray(held).reshape(-1).view(np.uint8).data).hexdigest()[:16]


def _not_alike(name: str, path: str, first: int, other: int) -> Problem:
    return Problem(
        "argument",
        f"{name}: {path}",
        f"other values in process {other} than in process {first}",
        "the whole argument, the same in every process",
        "each process puts its part of the whole on its own devices: parts of several would be mixed",
        "own_rows= in Program.place or own_rows=True in sbp.fit if each process has its own rows; "
        "otherwise one seed and one order of the data for all",
    )
