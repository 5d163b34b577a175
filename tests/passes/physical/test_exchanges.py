"""Which exchanges send together: those between the same devices that do not wait for each other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import S
from sbp.passes import spec
from sbp.passes.physical.program import Border, Compute, Physical, Step
from sbp.runtime.embedding.optimizers import rowwise_adagrad
from tests.passes.rows.test_tables import DEAR

ROWS, BATCH = 1 << 16, 4096
WIDTHS = 4, 8, 16


def tables(*widths: int) -> Any:
    return tuple(jax.ShapeDtypeStruct((ROWS, w), jnp.float32) for w in widths)


IDS = jax.ShapeDtypeStruct((BATCH,), jnp.int32)


def program(fn: Callable[..., Any], args: Any, in_sbp: Any, shape: tuple[int, ...] = (8,)) -> Physical:
    """The steps of a program whose tables and ids are split."""
    program = sbp.compile(
        fn, sbp.placement("cpu", shape=shape), in_sbp=in_sbp, options=sbp.Options(hardware=DEAR, check=True)
    )
    found = program.plan(*args).physical
    assert found is not None
    spec.check_physical(found)
    return found


def buckets(physical: Physical) -> list[list[str]]:
    """What each bucket of exchanges has, and every exchange by itself, in order."""
    out: list[list[str]] = []
    before = -1

    def walk(steps: tuple[Step, ...]) -> None:
        nonlocal before
        for s in steps:
            if isinstance(s, Compute) and s.node.op.startswith("sbp_"):
                width = str(physical.graph.operand(s.node.inputs[0]).shape[-1])
                assert s.bucket < 0 or s.bucket == before or s.bucket not in seen, "a bucket lies together"
                if s.bucket < 0 or s.bucket != before:
                    out.append([])
                out[-1].append(width)
                seen.add(s.bucket)
                before = s.bucket
            for body in s.bodies if isinstance(s, Border) else ():
                walk(body)

    seen: set[int] = set()
    walk(physical.steps)
    return out


def test_lookups_and_updates_of_all_widths() -> None:
    """Each of both is one exchange; they name the ids in the same order, so that keys are sent once."""
    tx = sbp.rows(rowwise_adagrad(0.1))

    def step(params: Any, state: Any, ids: Any) -> Any:
        def loss(params: Any) -> Any:
            return sum((p[i] ** 2).sum() for p, i in zip(params, ids, strict=True))

        added, state = tx.update(jax.grad(loss)(params), state, params)
        return jax.tree.map(jnp.add, params, added), state

    params = tables(*WIDTHS)
    args = list(params), jax.eval_shape(tx.init, list(params)), [IDS] * 3
    found = program(step, args, ([S(0)], sbp.AUTO, [S(0)]))
    together = buckets(found)
    assert list(map(sorted, together)) == [sorted(map(str, WIDTHS))] * 2
    assert together[0] == together[1]


def test_a_lookup_that_waits_for_another() -> None:
    """Ids that come of a table are not known before: two exchanges, of two each."""

    def chained(a: Any, b: Any, c: Any, d: Any, ids: Any) -> Any:
        first = a[ids].sum(-1).astype(jnp.int32) % ROWS
        other = b[ids].sum(-1).astype(jnp.int32) % ROWS
        return c[first], d[other]

    split = [S(0)]
    found = program(chained, (*tables(4, 8, 16, 32), IDS), (split,) * 5)
    assert buckets(found) == [["4", "8"], ["16", "32"]]


def test_what_would_wait_in_a_circle() -> None:
    """Two tables, each looked up by ids that come of the other: one pair at most goes together."""

    def crossed(a: Any, b: Any, c: Any, d: Any, ids: Any) -> Any:
        late_c = c[a[ids].sum(-1).astype(jnp.int32) % ROWS]
        late_b = b[d[ids].sum(-1).astype(jnp.int32) % ROWS]
        return late_c, late_b

    split = [S(0)]
    found = program(crossed, (*tables(4, 8, 16, 32), IDS), (split,) * 5)
    assert sorted(map(len, buckets(found))) == [2, 2]


def test_tables_that_lie_otherwise() -> None:
    """Each axis has its own exchange; a table that is whole has none."""

    def step(a: Any, b: Any, c: Any, whole: Any, ids: Any) -> Any:
        return a[ids], b[ids], c[ids], whole[ids]

    both, outer = [S(0), S(0)], [S(0), sbp.B]
    args = (*tables(4, 8, 16, 32), IDS)
    found = program(step, args, (both, both, outer, [sbp.B, sbp.B], both), (2, 4))
    assert ["4", "8"] in buckets(found) and ["16"] in buckets(found)


@pytest.mark.parametrize("parts", [1, 4])
def test_in_the_body_of_a_loop(parts: int) -> None:
    def step(a: Any, b: Any, ids: Any) -> Any:
        def body(total: Any, ids: Any) -> Any:
            return total + a[ids].sum() + (b[ids] ** 2).sum(), None

        return jax.lax.scan(body, 0.0, ids.reshape(parts, -1))[0]

    ids = jax.ShapeDtypeStruct((parts, BATCH), jnp.int32)
    found = program(step, (*tables(4, 8), ids), ([S(0)], [S(0)], [S(1)]))
    assert buckets(found) == [["4", "8"]]
