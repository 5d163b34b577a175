"""A bucket against its moves one by one: all of a kind over the same axes, of every shape, in one message."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sbp import view
from sbp.passes.boxing.moves import Move
from sbp.passes.physical.buckets import KINDS
from sbp.placement import placement
from sbp.runtime.hlo.meter import read_compiled
from sbp.runtime.lower.collectives import FusedSend, apply_bucket, apply_move
from sbp.signature import Split
from tests.runtime.lower.test_collectives import FAST, SHAPES, moves_of, stacked, table, tensor

HIERARCHIES = [(8,), (2, 4), (2, 2, 2)]


def bucketable(move: Move) -> bool:
    return move.kind in KINDS and (move.kind != "all_to_all" or isinstance(move.old, Split))


@pytest.mark.some(1)
@pytest.mark.parametrize("hierarchy", HIERARCHIES, ids=str)
def test_a_bucket_equals_its_moves(hierarchy: tuple[int, ...]) -> None:
    p = placement("cpu", shape=hierarchy)
    jobs = [
        (shape, move)
        for shape in SHAPES
        if 0 not in shape
        for move in moves_of(table(shape, p, ("sum",)))
        if bucketable(move)
    ]
    if len(jobs) > 80:
        jobs = [jobs[i] for i in np.random.default_rng(3).choice(len(jobs), 80, replace=False)]
    buckets: dict[Any, list[tuple[tuple[int, ...], Move]]] = {}
    for shape, move in jobs:
        buckets.setdefault((move.kind, move.axes), []).append((shape, move))
    assert {kind for kind, _ in buckets} == set(KINDS)
    starts = {(shape, move.before) for shape, move in jobs}
    inputs = {
        (shape, nd): stacked(view.split(tensor(shape, np.float32), nd, p.shape), p.shape)
        for shape, nd in starts
    }
    k = p.ndim

    def device(*arrays: Any) -> list[list[Any]]:
        at = [jax.lax.axis_index(a) for a in p.axes]
        held = {key: x.reshape(x.shape[k:]) for key, x in zip(inputs, arrays, strict=True)}
        together, alone = [], []
        for bucket in buckets.values():
            sends = [FusedSend(held[shape, move.before], move, shape) for shape, move in bucket]
            together += apply_bucket(sends, p.shape, p.axes)
            alone += [apply_move(q.x, q.move, q.shape, p.shape, p.axes, at) for q in sends]
        return [[x.reshape((1,) * k + x.shape) for x in xs] for xs in (together, alone)]

    spec = PartitionSpec(*p.axes)
    mapped = jax.jit(jax.shard_map(device, mesh=p.mesh, in_specs=spec, out_specs=spec, check_vma=False))
    together, alone = mapped.lower(*inputs.values()).compile(FAST)(*inputs.values())
    names = itertools.chain.from_iterable(buckets.values())
    for (shape, move), a, b in zip(names, together, alone, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=f"{shape} {move}")


def test_a_bucket_is_one_collective() -> None:
    p = placement("cpu", shape=(8,))
    shapes = [(16, 3), (5, 8), (24,)]
    moves = [next(m for m in moves_of(table(s, p, ())) if m.kind == "all_gather") for s in shapes]

    def device(*xs: Any) -> list[Any]:
        sends = [FusedSend(x, m, s) for x, m, s in zip(xs, moves, shapes, strict=True)]
        return apply_bucket(sends, p.shape, p.axes)

    inputs = [
        np.zeros([8 * -(-n // 8) if d == 0 else n for d, n in enumerate(s)], np.float32) for s in shapes
    ]
    spec = PartitionSpec(p.axes[0])
    mapped = jax.jit(
        jax.shard_map(device, mesh=p.mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=False)
    )
    meter = read_compiled(mapped.lower(*inputs).compile())
    count, _ = meter.by_kind()["all_gather"]
    assert count == 1
