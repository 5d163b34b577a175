"""Process-local data: arguments of which every process reads its own rows from its own files."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from sbp.compat.untyped import Leaf, PyTree, partition_spec
from sbp.errors import ArgumentError, Problem
from sbp.placement import Placement


def with_own_rows(tree: PyTree, placement: Placement, where: str) -> PyTree:
    """One array of the rows of all processes, in the order of the processes, per leaf; nothing is sent.

    Arguments:
      tree: "rows ..." in each process, of one shape in all. A single process has all rows.
      placement: each process puts its rows on its own devices of it.
      where: the argument, for messages.

    Raises:
      ArgumentError: for scalars, which have no rows, and placements with different numbers of devices per
        process.
    """
    if jax.process_count() == 1:
        return tree
    per_process = Counter(d.process_index for d in placement.mesh.devices.flat)
    if len(per_process) < jax.process_count() or len(set(per_process.values())) > 1:
        raise ArgumentError(_uneven(placement, where, per_process))
    return jax.tree.map_with_path(
        lambda path, x: _joined(x, placement, where + jax.tree_util.keystr(path)), tree
    )


def _joined(x: Leaf, placement: Placement, where: str) -> jax.Array:
    """One array of the rows of all processes."""
    own = np.asarray(x)
    if not own.ndim:
        raise ArgumentError(_no_rows(where, own))
    count = jax.process_count()
    devices = sorted(placement.mesh.devices.flat, key=lambda d: d.process_index)
    grid = np.array(devices, dtype=object).reshape(count, -1)
    mesh = Mesh(grid, ("process", "device"))
    rows = ("process", "device") if len(own) % grid.shape[1] == 0 else "process"
    sharding, begin = NamedSharding(mesh, partition_spec(rows)), jax.process_index() * len(own)

    def part(at: tuple[slice, ...] | None) -> NDArray[Any]:
        assert at is not None
        start, stop, _ = at[0].indices(count * len(own))
        return own[start - begin : stop - begin]

    return jax.make_array_from_callback((count * len(own), *own.shape[1:]), sharding, part)


def _no_rows(where: str, x: NDArray[Any]) -> Problem:
    return Problem(
        "argument",
        where,
        f"{x.dtype}[], of which this process is to have its own rows",
        "arrays of at least one dim",
        "rows are dim 0",
        "a number that is the same in all processes as an argument of its own",
    )


def _uneven(placement: Placement, where: str, per_process: Counter[int]) -> Problem:
    held = ", ".join(f"{n} in process {p}" for p, n in sorted(per_process.items()))
    return Problem(
        "argument",
        f"{where}, of which each process has its own rows",
        f"{placement}: {held} of {jax.process_count()}",
        "as many devices of each process",
        "the rows of a process are brought to its own devices of the placement",
        "the whole argument in every process, without own_rows",
    )
