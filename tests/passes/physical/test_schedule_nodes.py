"""A body as XLA's scheduler sees it: what runs as one."""

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import P, S
from sbp.passes.boxing.moves import Move
from sbp.passes.physical.fusion import Fusing, KernelOp, ShardSizes
from sbp.passes.physical.kernels import Kernels, kernels, program_kernels
from sbp.passes.physical.order import turns
from sbp.passes.physical.program import Box, Version
from sbp.passes.physical.schedule_nodes import (
    COMBINED_BYTES,
    combining_groups,
    hiding_ops,
    schedule_nodes,
    sent_together,
    units_in_order,
)

MB = 1_000_000


class Alike:
    """Every tensor has as many bytes as its number says."""

    def bytes(self, version: Version) -> float:
        return float(version[0])

    def shape(self, value: int) -> tuple[int, ...]:
        return ()


def body(ops: list[KernelOp], kept: list[Version]) -> Kernels:
    sizes: Any = Alike()
    return kernels(ops, sizes, kept, [(1, ())])


def summed(sizes: list[int], dtypes: list[str]) -> Kernels:
    """Per size a product and its all-reduce; results in reverse."""
    move = Move("all_reduce", (0,), (P,), (S(0),), P, S(0))
    ops, kept = list[KernelOp](), list[Version]()
    for k, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        n = size * MB + k
        part, whole = (n, (P,)), (n, (S(0),))
        ops.append(KernelOp(Fusing.CALL, [(1, ())], [part], product=True))
        ops.append(
            KernelOp(
                Fusing.CALL,
                [part],
                [whole],
                frozenset([part]),
                sends=True,
                step=Box(n, move, -1),
                combines=dtype,
            )
        )
        kept.insert(0, whole)
    return body(ops, kept)


def test_sets_are_filled_from_the_first_result_on() -> None:
    # Three would be too large; the last two are results first.
    assert sent_together(summed([12, 12, 12], ["x"] * 3)) == [(3, 5)]
    assert sent_together(summed([5, 5, 5], ["x", "y", "x"])) == [(1, 5)]
    assert sent_together(summed([5, 5, 5], [""] * 3)) == []


def test_sums_that_are_sent_as_one_are_packed() -> None:
    k = summed([5, 6], ["x", "x"])
    turn = turns(k, set(), None)
    [packed] = turn.packed_reductions
    assert packed.members == (1, 3)
    # What is packed is not needed any more; what is unpacked was not there.
    assert turn.read[1] == turn.read[3] == packed.first < min(turn.born[1], turn.born[3])
    assert packed.last == max(turn.born[1], turn.born[3])


def loop(read: list[int], made: int) -> KernelOp:
    return KernelOp(Fusing.LOOP, [(v, ()) for v in read], [(made, ())])


def test_who_reads_the_same_and_gives_as_much_is_one_kernel() -> None:
    product = KernelOp(Fusing.CALL, [(1, ())], [(50, ())], product=True)
    other = KernelOp(Fusing.CALL, [(7, ())], [(3, ())], product=True)

    class Same(Alike):
        def bytes(self, version: Version) -> float:
            return {8: 7.0}.get(version[0], float(version[0]))

        def shape(self, value: int) -> tuple[int, ...]:
            return ()

    sizes: Any = Same()
    ops = [product, loop([50], 7), loop([50], 8), loop([50], 9)]
    k = kernels(ops, sizes, [(7, ()), (8, ()), (9, ())], [(1, ())])
    nodes = schedule_nodes(k, [], list(range(5)), None)
    assert sorted(node.makes for node in nodes) == [(0,), (1, 2), (3,)]
    # Not if one waits for the other.
    ops = [product, loop([50], 7), other, loop([50, 3], 8)]
    k = kernels(ops, sizes, [(7, ()), (8, ())], [(1, ())])
    assert sorted(node.makes for node in schedule_nodes(k, [], list(range(5)), None)) == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]


def attended(scores: Any, values: Any) -> Any:
    """A tensor that is a result too, and so is written."""
    shares = jax.nn.softmax(scores)
    return shares, shares @ values


@pytest.mark.parametrize("dims", [2, 3, 4])
def test_a_product_reads_more_than_two_dims_under_another_shape(dims: int) -> None:
    """To XLA that is an op, for which the maker of the tensor waits."""
    x = jax.ShapeDtypeStruct((*(8, 16)[: dims - 2], 64, 64), jnp.float32)
    physical = sbp.compile(attended, sbp.placement("h100", shape=(1,))).plan(x, x).physical
    assert physical is not None
    k = program_kernels(ShardSizes(physical))
    nodes = schedule_nodes(k, (), [float(i) for i in range(len(k.ops) + 1)], None)
    ops = hiding_ops(k, nodes, ())
    (product,) = (j for j, node in enumerate(nodes) if any(k.ops[i].product for i in node.makes))
    if dims == 2:
        assert len(ops) == len(nodes)
    else:
        (view,) = range(len(nodes), len(ops))
        assert view in ops[product].makers and not set(ops[view].makers) & set(ops[product].makers)


HALF = COMBINED_BYTES / 2


def test_as_many_bytes_as_fit() -> None:
    sent = dict.fromkeys(range(5), ("x", HALF))
    assert combining_groups([[]] * 5, sent) == [(0, 1), (2, 3)]


def test_only_of_one_kind() -> None:
    assert combining_groups([[]] * 4, {0: ("x", 1.0), 1: ("y", 1.0), 2: ("x", 1.0), 3: ("y", 1.0)}) == [
        (0, 2),
        (1, 3),
    ]


def test_not_what_waits_for_another_even_by_way_of_others() -> None:
    assert combining_groups([[], [0], [1], []], {0: ("x", 1.0), 2: ("x", 1.0), 3: ("x", 1.0)}) == [(2, 3)]


def test_a_large_one_alone() -> None:
    assert combining_groups([[]] * 2, {0: ("x", 2 * COMBINED_BYTES), 1: ("x", 1.0)}) == []


def test_sets_that_wait_for_each_other_are_taken_apart() -> None:
    """0 and 3 of one set, 1 and 2 of another: 1 waits for 0, and 3 for 2."""
    makers: list[list[int]] = [[], [0], [], [2]]
    assert units_in_order(makers, [(0, 3), (1, 2)]) == [(0,), (1,), (2,), (3,)]


def test_in_an_order_that_can_run() -> None:
    rng = random.Random(0)
    for _ in range(200):
        n = 12
        makers = [sorted(rng.sample(range(i), min(i, rng.randrange(3)))) for i in range(n)]
        sent = {i: (rng.randrange(2), HALF / 2) for i in range(n) if rng.random() < 0.6}
        units = units_in_order(makers, combining_groups(makers, sent))
        assert sorted(i for unit in units for i in unit) == list(range(n))
        done = set[int]()
        for unit in units:
            assert all(m in done for i in unit for m in makers[i])
            done.update(unit)
