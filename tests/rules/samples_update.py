"""Applications of ops on the rows of a gradient, with whole numbers in which every step is exact."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from sbp.lazy import Update
from sbp.passes.program.trace import trace
from sbp.passes.rows.columns import column_step
from sbp.rules.row_sums import sum_rows_p
from sbp.rules.update import update_rows_p
from sbp.signature import B, S
from tests.rules.claims import Sample, sample, whole

FILL, CLIP = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP
IDS = np.array([[3, 9, 3], [0, 4, 12], [3, 7, -1], [4, 4, 0], [8, 9, 3]], np.int32)
# Five groups of two rows, and a bag of three ids for each; -1 is none.
GROUPS = np.array([[0, 1, 1], [2, 2, -1], [4, 5, 4], [-1, -1, -1], [9, 8, 9]], np.int32)


def plain(grad: Any, state: Any, param: Any = None) -> tuple[Any, Any]:
    """Adds the gradient, twice."""
    return 2 * grad, state


def curved(grad: Any, state: Any, param: Any) -> tuple[Any, Any]:
    """Not linear in the gradient, with a state as large as the table, and a count."""
    total, count = state
    total = total + grad * grad
    return -grad * total + param, (total, count + 1)


def by_row(grad: Any, state: Any, param: Any) -> tuple[Any, Any]:
    """One number per row, of all its columns."""
    total = state + jnp.sum(grad * grad, axis=1)
    return grad * total[:, None], total


def update(
    step: Callable[..., Any], state: Any, *ids: Any, modes: Sequence[Any], columns: Any, **options: Any
) -> Sample:
    """A step with the given lookups; options are the op's, and those of a sample."""
    leaves, tree = jax.tree.flatten(state)
    capacity, grouped = options.pop("capacity", None), options.pop("grouped", False)
    additive = options.pop("additive", False)
    adds_up = options.pop("adds_up", False)
    kind = "grouped-" if grouped else "additive-" if additive else "columns-" if adds_up else ""
    names = "-".join(str(m).rsplit(".")[-1] for m in modes)
    label = f"{step.__name__}-{len(ids)}-{capacity}-{kind}{options.get('groups', '')}{names}"

    run, table = Update(step, tree, not additive), whole((10, 3))
    lying = [S(1), *(columns or ()), S(1)]
    across = column_step(run, trace(run, [table, *leaves, table], {}).graph, lying) if adds_up else None

    def fn(table: Any, *operands: Any) -> Any:
        return update_rows_p.bind(
            table,
            *operands,
            update=run,
            modes=tuple(modes),
            columns=columns,
            column_step=across,
            additive=additive,
            grouped=grouped,
            capacity=capacity,
            wire_dtype=None,
            samples=(),
        )

    rows = [whole((*i.shape, 3), seed=k) for k, i in enumerate(ids)]
    return sample("sbp_update_rows", fn, table, *leaves, *ids, *rows, label=label, **options)


TOTALS = whole((10, 3), low=0)

SAMPLES = [
    update(plain, (), IDS, modes=[FILL], columns=(), pairs=2),
    update(plain, (), IDS, modes=[CLIP], columns=(), capacity=1),
    update(plain, (), IDS, modes=[FILL], columns=(), additive=True, pairs=2),
    update(plain, (), IDS, IDS[:, 0], modes=[CLIP, FILL], columns=(), additive=True, capacity=1),
    update(curved, (TOTALS, np.int32(1)), IDS, modes=[FILL], columns=(S(1), B), pairs=2),
    update(by_row, whole((10,), low=0), IDS, modes=[FILL], columns=None, capacity=2),
    update(by_row, whole((10,), low=0), IDS, modes=[FILL], columns=(B,), adds_up=True, pairs=2),
    update(plain, (), IDS, IDS[:, 0], modes=[FILL, CLIP], columns=()),
    update(curved, (TOTALS, np.int32(1)), GROUPS, modes=[FILL], columns=(S(1), B), grouped=True),
    update(curved, (TOTALS, np.int32(1)), GROUPS, modes=[FILL], columns=(S(1), B), grouped=True, groups=(5,)),
]


def square(rows: Any) -> Any:
    """What counts for a norm."""
    return rows * rows


def above(rows: Any) -> Any:
    """What counts for a check."""
    return (rows > 3).astype(np.int32)


def summed(*ids: Any, modes: Sequence[Any], measure: Any = square, **options: Any) -> Sample:
    """A sum over a gradient by rows."""
    capacity, grouped = options.pop("capacity", None), options.pop("grouped", False)
    label = f"{len(ids)}-{capacity}-{'grouped' if grouped else ''}{options.get('groups', '')}"

    def fn(table: Any, *operands: Any) -> Any:
        return sum_rows_p.bind(
            table,
            *operands,
            measure=measure,
            modes=tuple(modes),
            grouped=grouped,
            capacity=capacity,
            wire_dtype=None,
            samples=(),
        )

    rows = [whole((*i.shape, 3), seed=k) for k, i in enumerate(ids)]
    return sample("sbp_sum_rows", fn, whole((10, 3)), *ids, *rows, label=label, **options)


SAMPLES += [
    summed(IDS, modes=[FILL], pairs=2),
    summed(IDS, modes=[CLIP], capacity=1, measure=above),
    summed(IDS, IDS[:, 0], modes=[FILL, CLIP]),
    summed(GROUPS, modes=[FILL], grouped=True, groups=(5,)),
]
