"""Every move on eight CPU devices, shard by shard, against the NumPy meaning; and its bytes in compiled HLO.

One program holds all moves of a table: an input per signature, an output per move. A path is a chain of such
moves (tests/passes proves the chains), so this proves every pair of signatures.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from sbp import view
from sbp.hardware.catalogue import hardware_for
from sbp.layout import local_shape
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move, wire_bytes
from sbp.passes.boxing.paths import Boxing
from sbp.placement import Placement, placement
from sbp.runtime.hlo.meter import read_compiled
from sbp.runtime.lower.collectives import apply_move, explode, implode
from sbp.signature import B, NdSbp, P, Partial, S, Signature
from tests.passes.boxing.move_reference import interpret
from tests.sbp.slicer import HOLE, rows_of

SHAPES = [(4, 4), (6, 8), (5, 7), (1, 3), (0, 2)]
FAST = {"xla_backend_optimization_level": 0}  # the collectives are the same; the compiler is twice as fast
OPS = ("sum", "max", "min", "prod")
Array = np.ndarray[Any, Any]


def table(shape: tuple[int, ...], p: Placement, ops: Sequence[str], dtype: Any = np.float32) -> Boxing:
    network = Network(p, hardware_for("cpu"))
    return Boxing(shape, np.dtype(dtype), network, frozenset(ops), tuple(range(len(shape))))


def moves_of(box: Boxing) -> list[Move]:
    """Every move that lies on a cheapest path."""
    paths = (box.path(a, b) for a, b in itertools.product(box.universe, repeat=2))
    return list(dict.fromkeys(move for path in paths for move in path))


def tensor(shape: Sequence[int], dtype: Any) -> Array:
    numbers = np.random.default_rng(7).integers(-50, 50, size=shape)
    return (numbers % 2 == 0) if dtype == np.bool_ else numbers.astype(dtype)


def stacked(shards: view.Shards, hierarchy: tuple[int, ...]) -> Array:
    """The shards as one array whose leading dims are the hierarchy."""
    first = shards[(0,) * len(hierarchy)]
    return np.stack([shards[c] for c in view.coordinates(hierarchy)]).reshape(*hierarchy, *first.shape)


Job = tuple[tuple[int, ...], NdSbp, tuple[Move, ...]]  # logical shape, signature at the start, moves


def run(p: Placement, jobs: Sequence[Job], dtype: Any) -> list[Array]:
    """All jobs in one shard_map program; the shards at the end of each, stacked."""
    inputs: dict[tuple[tuple[int, ...], NdSbp], Array] = {}
    for shape, start, _ in jobs:
        if (shape, start) not in inputs:
            shards = view.split(tensor(shape, dtype), start, p.shape)
            inputs[shape, start] = stacked(shards, p.shape)
    spec, k = PartitionSpec(*p.axes), p.ndim

    def device(*arrays: Any) -> list[Any]:
        at = [jax.lax.axis_index(a) for a in p.axes]
        held = {key: x.reshape(x.shape[k:]) for key, x in zip(inputs, arrays, strict=True)}
        outs = []
        for shape, start, moves in jobs:
            x = held[shape, start]
            for move in moves:
                x = apply_move(x, move, shape, p.shape, p.axes, at)
            outs.append(x.reshape((1,) * k + x.shape))
        return outs

    mapped = jax.shard_map(device, mesh=p.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    compiled = jax.jit(mapped).lower(*inputs.values()).compile(compiler_options=FAST)
    return [np.asarray(x) for x in compiled(*inputs.values())]


def unstacked(out: Array, p: Placement) -> view.Shards:
    return {c: out[c] for c in view.coordinates(p.shape)}


def check_moves(p: Placement, tables: Sequence[Boxing], dtype: Any = np.float32, sample: int = 0) -> None:
    jobs: list[Job] = [(box.shape, m.before, (m,)) for box in tables for m in moves_of(box)]
    if sample:
        chosen = np.random.default_rng(11).choice(len(jobs), sample, replace=False)
        jobs = [jobs[i] for i in sorted(chosen)]
    for (shape, start, (move,)), out in zip(jobs, run(p, jobs, dtype), strict=True):
        x, shards = tensor(shape, dtype), unstacked(out, p)
        given = f"{shape} {move}"
        assert out.dtype == x.dtype, given
        # 1. It means the same tensor, and copies are equal.
        np.testing.assert_array_equal(view.join(shards, shape, move.after, p.shape), x, err_msg=given)
        # 2. Each shard is the one that the reference gives, summands included.
        expected = interpret(move, view.split(x, start, p.shape), shape, p.shape, dtype)
        for c in shards:
            real = ~np.isnan(expected[c])
            np.testing.assert_array_equal(
                shards[c][real].astype(np.float64), expected[c][real], err_msg=given
            )
        # 3. Where nothing is partial, it is the shard that the language gives.
        if not any(isinstance(s, Partial) for s in move.after):
            for c, whole in view.split(x, move.after, p.shape).items():
                valid = np.ix_(*([r != HOLE for r in rows] for rows in _rows(shape, move.after, p, c)))
                np.testing.assert_array_equal(shards[c][valid], whole[valid], err_msg=given)


def _rows(shape: Sequence[int], nd: NdSbp, p: Placement, at: tuple[int, ...]) -> list[list[int]]:
    return [rows_of(n, d, nd, p.shape, at) for d, n in enumerate(shape)]


LINES = [
    placement("cpu", shape=(2,)),
    placement("cpu", ranks=[2, 0, 1]),
    placement("cpu", ranks=[3, 1, 0, 2]),
    placement("cpu", shape=(5,)),
    placement("cpu", ranks=[7, 5, 3, 1, 0, 2]),
    placement("cpu", shape=(7,)),
    placement("cpu", shape=(8,)),
]
GRIDS = [
    placement("cpu", ranks=[[0, 3], [1, 2]]),
    placement("cpu", shape=(2, 4)),
    placement("cpu", ranks=[[7, 5], [3, 1], [0, 2], [4, 6]]),
]


@pytest.mark.some(2)
@pytest.mark.parametrize("p", LINES, ids=str)
def test_every_move_along_one_axis(p: Placement) -> None:
    check_moves(p, [table(shape, p, OPS) for shape in SHAPES])


@pytest.mark.some(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("p", GRIDS, ids=str)
def test_every_move_along_two_axes(p: Placement, shape: tuple[int, ...]) -> None:
    check_moves(p, [table(shape, p, OPS if p.size == 4 else ("sum", "max"))])


def test_every_move_along_three_axes() -> None:
    p = placement("cpu", ranks=[[[0, 4], [2, 6]], [[1, 5], [3, 7]]])
    check_moves(p, [table((8,), p, ("sum", "max"))])


@pytest.mark.full
@pytest.mark.parametrize(("shape", "ops"), [((8, 8), ("sum", "max")), ((5, 7), OPS)], ids=str)
def test_a_sample_of_moves_along_three_axes(shape: tuple[int, ...], ops: tuple[str, ...]) -> None:
    p = placement("cpu", shape=(2, 2, 2))
    check_moves(p, [table(shape, p, ops)], sample=150)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        (np.int32, ("sum", "min")),
        (np.int32, ("and", "xor")),
        (np.int8, ("max", "or")),
        (ml_dtypes.bfloat16, ("sum", "max")),
        (np.bool_, ("max", "min", "xor")),
    ],
    ids=["int32", "bits", "int8", "bfloat16", "bool"],
)
def test_every_dtype(dtype: Any, ops: tuple[str, ...]) -> None:
    p = placement("cpu", shape=(2, 2))
    check_moves(p, [table((5, 7), p, ops, dtype)], dtype)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("shape", "p"),
    [((5, 7), placement("cpu", shape=(4,))), ((4, 4), placement("cpu", shape=(2, 2)))],
    ids=str,
)
def test_whole_paths_between_all_pairs(shape: tuple[int, ...], p: Placement) -> None:
    """The chains too: every signature to every other, in one program."""
    box = table(shape, p, ("sum", "max"))
    pairs = list(itertools.product(box.universe, repeat=2))
    jobs = [(shape, a, box.path(a, b)) for a, b in pairs]
    x = tensor(shape, np.float32)
    for (a, b), out in zip(pairs, run(p, jobs, np.float32), strict=True):
        assert out.shape[p.ndim :] == local_shape(shape, b, p.shape)
        joined = view.join(unstacked(out, p), shape, b, p.shape)
        np.testing.assert_array_equal(joined, x, err_msg=f"{a} -> {b}")


def test_infinities_are_not_lost_on_the_way() -> None:
    """Moves that mask or fill must select, never multiply: 0 * inf is NaN."""
    p = placement("cpu", shape=(2,))
    x = np.array([np.inf, -np.inf, np.nan, 1.0, 2.0], np.float32)
    box = table((5,), p, OPS)
    for before, after in [((B,), (P,)), ((S(0),), (P,)), ((S(0),), (P("max"),)), ((S(0),), (B,))]:
        (move,) = box.path(before, after)

        def device(g: Any, move: Move = move) -> Any:
            return apply_move(g[0], move, (5,), p.shape, p.axes, [jax.lax.axis_index("x")])[None]

        spec = PartitionSpec("x")
        mapped = jax.shard_map(device, mesh=p.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        out = np.asarray(jax.jit(mapped)(stacked(view.split(x, before, p.shape), p.shape)))
        np.testing.assert_array_equal(view.join(unstacked(out, p), (5,), after, p.shape), x)


@pytest.mark.some(3)
@pytest.mark.parametrize("groups", [(4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 3), (8,)], ids=str)
def test_explode_lays_the_shards_side_by_side(groups: tuple[int, ...]) -> None:
    """Rows and columns, of every size to 9, and back again."""
    nd = (S(0),) * len(groups)
    plain = [np.arange(1, size * 2 + 1, dtype=np.int32).reshape(size, 2) for size in range(10)]
    rows = [[r for c in view.coordinates(groups) for r in rows_of(len(x), 0, nd, groups, c)] for x in plain]
    laid = [
        np.array([x[r] if r != HOLE else (-7, -7) for r in at], np.int32).reshape(-1, 2)
        for x, at in zip(plain, rows, strict=True)
    ]

    @jax.jit
    def there_and_back(plain: list[Any], laid: list[Any]) -> tuple[list[Any], ...]:
        return (
            [explode(x, 0, groups, fill=-7) for x in plain],
            [explode(x.T, 1, groups, fill=-7).T for x in plain],
            [implode(x, 0, groups, size) for size, x in enumerate(laid)],
            [implode(x.T, 1, groups, size).T for size, x in enumerate(laid)],
        )

    for found, expected in zip(there_and_back(plain, laid), (laid, laid, plain, plain), strict=True):
        jax.tree.map(np.testing.assert_array_equal, found, expected)


M = P("max")
# (kind, hierarchy, shape, before, after): along one, several and not adjacent axes, padded or not
FAMILIES: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[Signature, ...], tuple[Signature, ...]]] = [
    ("all_reduce", (8,), (5, 7), (P,), (B,)),
    ("all_reduce", (2, 4), (5, 7), (M, B), (B, B)),
    ("all_reduce", (2, 4), (6, 8), (P, P), (B, B)),
    ("all_reduce", (2, 2, 2), (6, 8), (P, S(0), P), (B, S(0), B)),
    ("all_gather", (8,), (5, 7), (S(0),), (B,)),
    ("all_gather", (2, 4), (5, 7), (S(0), S(0)), (B, B)),
    ("all_gather", (2, 4), (8, 8), (S(0), S(1)), (S(0), B)),
    ("all_gather", (2, 2, 2), (5, 7), (S(1), S(0), S(1)), (B, S(0), B)),
    ("reduce_scatter", (8,), (5, 7), (P,), (S(1),)),
    ("reduce_scatter", (2, 4), (8, 8), (P, P), (S(0), S(0))),
    ("reduce_scatter", (2, 4), (5, 7), (S(0), P), (S(0), S(0))),
    ("all_to_all", (8,), (5, 7), (S(0),), (S(1),)),
    ("all_to_all", (2, 4), (5, 7), (S(0), S(0)), (S(1), S(1))),
    ("all_to_all", (2, 4), (8, 8), (S(0), S(1)), (S(0), S(0))),
    ("all_to_all", (8,), (5, 7), (M,), (S(1),)),
    ("all_to_all", (2, 4), (5, 7), (M, M), (S(0), S(0))),
    ("permute", (2, 4), (8, 8), (S(0), B), (B, S(0))),
    ("permute", (2, 2), (4, 4), (S(0), S(1)), (S(1), S(0))),
    ("permute", (2, 2, 2), (8, 8), (B, P, S(0)), (S(0), P, S(0))),
]


@pytest.mark.some(8)
@pytest.mark.parametrize(("kind", "hierarchy", "shape", "before", "after"), FAMILIES, ids=str)
def test_the_plans_bytes_are_those_of_the_compiled_program(
    kind: str, hierarchy: tuple[int, ...], shape: tuple[int, ...], before: NdSbp, after: NdSbp
) -> None:
    p = placement("cpu", shape=hierarchy)
    box = table(shape, p, ("sum", "max"))
    (move,) = [m for m in moves_of(box) if (m.kind, m.before, m.after) == (kind, before, after)]
    spec, k = PartitionSpec(*p.axes), p.ndim

    def device(x: Any) -> Any:
        at = [jax.lax.axis_index(a) for a in p.axes]
        out = apply_move(x.reshape(x.shape[k:]), move, shape, p.shape, p.axes, at)
        return out.reshape((1,) * k + out.shape)

    mapped = jax.shard_map(device, mesh=p.mesh, in_specs=spec, out_specs=spec, check_vma=False)
    argument = jax.ShapeDtypeStruct((*p.shape, *local_shape(shape, before, p.shape)), np.float32)
    meter = read_compiled(jax.jit(mapped).lower(argument).compile())
    expected = wire_bytes(move, shape, 4, p.shape)
    assert meter.by_kind() == {kind: (1, pytest.approx(expected))}
    assert expected > 0


@pytest.mark.parametrize("shape", [(8, 8), (5, 7)], ids=str)
def test_local_moves_send_nothing(shape: tuple[int, ...]) -> None:
    p = placement("cpu", shape=(2, 4))
    box = table(shape, p, ("sum", "max"))
    jobs = [m for m in moves_of(box) if not m.is_collective]
    assert {m.kind for m in jobs} == {"slice", "fill", "embed", "keep"}

    def device(*arrays: Any) -> list[Any]:
        at = [jax.lax.axis_index(a) for a in p.axes]
        return [apply_move(x, m, shape, p.shape, p.axes, at) for x, m in zip(arrays, jobs, strict=True)]

    whole = PartitionSpec()
    mapped = jax.shard_map(device, mesh=p.mesh, in_specs=whole, out_specs=whole, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(local_shape(shape, m.before, p.shape), np.float32) for m in jobs]
    compiled = jax.jit(mapped).lower(*arguments).compile(compiler_options=FAST)
    assert read_compiled(compiled).collectives == ()
