"""Which collectives leave together: the same moves in a legal order, no bucket over its limit."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import sbp
from sbp import S
from sbp.hardware.catalogue import Hardware, hardware_for
from sbp.passes import spec
from sbp.passes.physical.buckets import KINDS, bucket_collectives
from sbp.passes.physical.program import Border, Box, Physical, Step
from sbp.passes.plan.cost import local_bytes
from sbp.runtime.hlo.meter import read_compiled

CPU = dataclasses.replace(hardware_for("cpu"), memory_bytes_per_second=4e9)  # splitting pays
MERGING = dataclasses.replace(CPU, merges_collectives=True)
LIMIT_BYTES = CPU.links[0].latency_seconds * CPU.memory_bytes_per_second / 2


def layers(params: Any, x: Any) -> Any:
    for w, b in params:
        x = jnp.tanh(x @ w + b)
    return (x * x).mean()


def step(params: Any, x: Any) -> Any:
    loss, grads = jax.value_and_grad(layers)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def params(n: int = 5, width: int = 16) -> Any:
    keys = jax.random.split(jax.random.key(0), n)
    return [(jax.random.normal(k, (width, width)) / 4, jnp.zeros(width)) for k in keys]


def physical(hardware: Hardware, width: int = 16) -> Physical:
    """Parameters at rest in pieces: gathered one by one, and their gradients scattered."""
    program = sbp.compile(
        step,
        sbp.placement("cpu", shape=(8,)),
        in_sbp=([S(0)], [S(0)]),
        options=sbp.Options(hardware=hardware),
    )
    shapes = jax.eval_shape(lambda: params(width=width))
    found = program.plan(shapes, jax.ShapeDtypeStruct((4096, width), jnp.float32)).physical
    assert found is not None
    return found


def boxes(steps: Sequence[Step]) -> Iterator[Box]:
    for s in steps:
        if isinstance(s, Box):
            yield s
        if isinstance(s, Border):
            for body in s.bodies:
                yield from boxes(body)


def sizes(p: Physical, bucket: Sequence[Box]) -> float:
    values = p.graph.values
    return sum(
        max(local_bytes(values[b.value].shape, values[b.value].dtype, nd, p.placement.shape) for nd in ends)
        for b in bucket
        for ends in [(b.move.before, b.move.after)]
    )


def check(before: Physical, after: Physical) -> dict[int, list[Box]]:
    """What must hold of any bucketing; returns the buckets."""
    spec.check_physical(after)
    plain = [dataclasses.replace(b, bucket=-1) for b in boxes(after.steps)]
    assert Counter(map(str, plain)) == Counter(map(str, boxes(before.steps)))
    buckets: dict[int, list[Box]] = {}
    for b in boxes(after.steps):
        if b.bucket >= 0:
            buckets.setdefault(b.bucket, []).append(b)
    for bucket in buckets.values():
        assert len(bucket) > 1
        assert len({(b.move.kind, b.move.axes, str(after.graph.values[b.value].dtype)) for b in bucket}) == 1
        assert bucket[0].move.kind in KINDS
        assert sizes(after, bucket) <= LIMIT_BYTES
        written = {(b.value, b.move.after) for b in bucket}
        assert not written & {(b.value, b.move.before) for b in bucket}  # none waits for another
    runs = [n for n, _ in itertools.groupby(b.bucket for b in boxes(after.steps))]
    assert len([n for n in runs if n >= 0]) == len(buckets)  # the moves of a bucket are neighbours
    return buckets


def test_small_moves_leave_together() -> None:
    before = physical(MERGING)
    assert all(b.bucket < 0 for b in boxes(before.steps))
    buckets = check(before, bucket_collectives(before, CPU))
    kinds = Counter(b.move.kind for b in boxes(before.steps))
    left = {k: sum(b[0].move.kind == k for b in buckets.values()) for k in kinds}
    assert kinds["all_gather"] >= 10 and left["all_gather"] <= 2
    assert kinds["reduce_scatter"] >= 10 and left["reduce_scatter"] <= 2


def test_large_moves_stay_where_they_are() -> None:
    width = 512  # a matrix of 1 MB
    before = physical(MERGING, width)
    after = bucket_collectives(before, CPU)
    check(before, after)
    matrices = [b for b in boxes(after.steps) if before.graph.values[b.value].shape == (width, width)]
    assert matrices and all(b.bucket < 0 for b in matrices)


def test_a_machine_whose_compiler_merges_gets_no_buckets() -> None:
    before = physical(MERGING)
    assert bucket_collectives(before, MERGING) is before
    assert hardware_for("gpu").merges_collectives


def test_bodies_of_loops_have_buckets_of_their_own() -> None:
    def scanned(ws: Any, x: Any) -> Any:
        def layer(x: Any, wb: Any) -> Any:
            w, b, c = wb
            return jnp.tanh(x @ w + b) * c, None

        return jax.lax.scan(layer, x, ws)[0].sum()

    ws = (jnp.zeros((3, 16, 16)), jnp.zeros((3, 16)), jnp.ones((3, 16)))
    x = jnp.ones((4096, 16))
    place = sbp.placement("cpu", shape=(8,))
    in_sbp = ([S(1)], [S(0)])
    plans = [
        sbp.compile(scanned, place, in_sbp=in_sbp, options=sbp.Options(hardware=h)).plan(ws, x)
        for h in (MERGING, CPU)
    ]
    before, after = (p.physical for p in plans)
    assert before is not None and after is not None
    assert check(before, after)
    assert plans[0].wire_bytes == plans[1].wire_bytes


def test_the_program_is_the_same_with_fewer_collectives() -> None:
    place = sbp.placement("cpu", shape=(8,))
    x = jax.random.normal(jax.random.key(1), (64, 16))
    expected = jax.jit(step)(params(), x)
    executed = []
    for hardware in (MERGING, CPU):
        options = sbp.Options(hardware=hardware)
        program = sbp.compile(step, place, in_sbp=([S(0)], [S(0)]), options=options)
        for a, b in zip(jax.tree.leaves(program(params(), x)), jax.tree.leaves(expected), strict=True):
            assert jnp.allclose(a, b, atol=1e-6)
        meter = read_compiled(program.lower(params(), x).compile())
        assert abs(meter.wire_bytes - program.plan(params(), x).wire_bytes) <= 0.01 * meter.wire_bytes
        executed.append(sum(n for n, _ in meter.by_kind().values()))
    assert executed[1] < executed[0]
