"""The first trip of a loop before it: when there is one, and what of it runs beside collectives."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.physical.fusion import Fusing, KernelOp, ShardSizes
from sbp.passes.physical.kernels import kernels
from sbp.passes.physical.order import turns
from sbp.passes.physical.program import Border, Version
from sbp.passes.physical.trips import peeled_ops, sunk_into, trip_ops

LAYERS, N = 4, 256


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def products(ws: Any, x: Any) -> Any:
    """Of each layer a sum over the batch, which is scattered and stacked."""

    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return y, sbp.annotate(x.T @ y, [S(0)])

    return lax.scan(layer, jnp.sin(x), ws)


def ops_of(layers: int, devices: int) -> tuple[list[KernelOp], ShardSizes]:
    """The scan as ops, over so many devices."""
    on = sbp.placement("h100", shape=(devices,))
    program = sbp.compile(products, on, in_sbp=([B], [S(0)]), out_sbp=([S(0)], [S(1)]))
    physical = program.plan(floats(layers, N, N), floats(64 * N, N)).physical
    assert physical is not None
    sizes = ShardSizes(physical)
    return peeled_ops(physical.steps, sizes), sizes


def test_the_first_trip_of_a_loop_that_sends_one_trip_later() -> None:
    ops, sizes = ops_of(LAYERS, 8)
    [loop] = [i for i, op in enumerate(ops) if isinstance(op.step, Border)]
    peeled = [i for i, op in enumerate(ops) if op.peeled]
    assert peeled and peeled[-1] + 1 == loop
    step = ops[loop].step
    assert isinstance(step, Border)
    trip = trip_ops(step, 0, sizes)
    inner = [op.step for op in trip.ops if op.step is not None]
    assert [ops[i].step for i in peeled if ops[i].step is not None] == inner
    # The loop goes on with what its first trip has made.
    made = {v for i in peeled for v in ops[i].writes}
    assert set(ops[loop].straight) <= made
    assert made & set(ops[loop].reads)


@pytest.mark.parametrize(("layers", "devices"), [(1, 8), (LAYERS, 1)])
def test_no_trip_is_taken_out(layers: int, devices: int) -> None:
    """There is no next one, or nothing to send."""
    ops, _ = ops_of(layers, devices)
    assert not any(op.peeled for op in ops)


def scanned(low: Any, inside: bool) -> float:
    """The bytes of a scan that reads a large tensor from outside, or makes it in each trip."""

    def fn(ws: Any, x: Any) -> Any:
        outside = low(x)

        def layer(x: Any, w: Any) -> Any:
            return jnp.where(x > 0, x @ w, low(x) if inside else outside), None

        return lax.scan(layer, x, ws)[0]

    one = sbp.placement("h100", shape=(1,))
    return sbp.compile(fn, one).plan(floats(LAYERS, N, N), floats(N, N)).memory_bytes


def test_a_repeated_scalar_enters_no_loop() -> None:
    def repeated(x: Any) -> Any:
        return jnp.full((N, N), -1e9, x.dtype)

    assert scanned(repeated, inside=False) == pytest.approx(scanned(repeated, inside=True))

    def sorted_rows(x: Any) -> Any:
        return jnp.sort(x, 0)

    ws, x = floats(LAYERS, N, N), floats(N, N)
    rest = 4 * (ws.size + x.size)
    assert scanned(sorted_rows, inside=False) - rest >= scanned(repeated, inside=False) - rest + 4 * N * N


def test_what_a_trip_makes_itself_is_not_held_from_outside() -> None:
    def fn(ws: Any, x: Any) -> Any:
        low = jnp.full((N, N), -1e9, jnp.float32)
        return lax.scan(lambda x, w: (jnp.where(x > 0, x @ w, low), None), x, ws)[0]

    physical = (
        sbp.compile(fn, sbp.placement("h100", shape=(1,))).plan(floats(LAYERS, N, N), floats(N, N)).physical
    )
    assert physical is not None
    sizes = ShardSizes(physical)
    [loop] = [op for op in peeled_ops(physical.steps, sizes) if isinstance(op.step, Border)]
    sunk = sunk_into(loop)
    assert isinstance(loop.step, Border)
    whole, inside = trip_ops(loop.step, 0, sizes), trip_ops(loop.step, 0, sizes, sunk)
    assert len(sunk) == 1 and len(inside.whole_inputs) == len(whole.whole_inputs) - 1
    assert len(inside.ops) == len(whole.ops) + 1


class Alike:
    """Every tensor has one byte."""

    def bytes(self, version: Version) -> float:
        return 1.0

    def shape(self, value: int) -> tuple[int, ...]:
        return ()


def op(reads: list[int], writes: list[int], **what: bool) -> KernelOp:
    return KernelOp(Fusing.CALL, [(v, ()) for v in reads], [(v, ()) for v in writes], **what)


@pytest.mark.parametrize("collective", [1.0, 3.0])
def test_products_that_need_no_gradient_hide_collectives_before(collective: float) -> None:
    ops = [
        op([1], [10], product=True),
        op([10], [11], sends=True),
        op([11], [12], product=True),
        # A first trip: it computes its layer again, and then needs a gradient.
        op([10], [20], peeled=True),
        op([20], [21], product=True, peeled=True),
        op([21], [22], product=True, peeled=True),
        op([22, 12], [23], product=True, peeled=True),
        op([23], [24], product=True),
    ]
    sizes: Any = Alike()
    k = kernels(ops, sizes, [(24, ())], [(1, ())])
    turn = turns(k, [t for t in k.tensors if t.maker < 0], lambda x: collective if x.sends else 1.0)
    assert [i for i in sorted(range(len(ops)), key=turn.born.__getitem__) if k.runs(i)] == [
        *(0, 1, 3, 4, 5, 2, 6, 7)
    ]
