"""Compares host arrays between processes when they are first placed: each must give the same values.

`jax.device_put` compares every host array with those of all other processes each time, so a batch per step
goes to all. Here each process sends a digest, once per argument of a program. That finds mistakes that occur
every time, such as different rows in each process; later calls send nothing.
"""

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
      checked_positions: their positions.
      many: whether there are other processes; None before the first arguments are placed.
    """

    checked_positions: set[int] = field(default_factory=set)
    many: bool | None = None

    def lacks(self, positions: Iterable[int]) -> bool:
        """Whether an argument still has to be compared, or none was placed yet."""
        return self.many is None or (self.many and not self.checked_positions.issuperset(positions))

    def check(
        self,
        process_group: ProcessGroup | None,
        name: str,
        paths: Sequence[str],
        given: Sequence[tuple[Leaf, bool]],
    ) -> None:
        """Compares host arrays of arguments that were not compared before. All processes call it together.

        Arguments:
          process_group: the processes; None if there is one.
          name: of the program.
          paths: names of its arguments.
          given: the arguments, and whether this process has devices on which they lie.

        Raises:
          ArgumentError: if values differ; on all processes.
        """
        first, self.many = self.many is None, process_group is not None
        if process_group is None:
            return
        new = [i for i, (x, _) in enumerate(given) if i not in self.checked_positions and is_of_host(x)]
        if not first and not new:
            return
        self.checked_positions.update(new)
        differs = process_group.differing_keys(
            name, {str(i): digest(given[i][0]) for i in new if given[i][1]}
        )
        if differs:
            raise ArgumentError(*(_not_alike(name, paths[int(i)], *two) for i, two in differs.items()))


def is_of_host(x: Leaf) -> bool:
    """Whether an array lies wholly in this process, and so may differ from those of other processes."""
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def digest(x: Leaf) -> str:
    """A digest of the bytes of a host array.

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
