"""In which order kernels run."""

from typing import Any

import pytest

from sbp import P, S
from sbp.passes.boxing.moves import Move
from sbp.passes.physical.fusion import Fusing, KernelOp
from sbp.passes.physical.kernels import Buffer, Kernels, kernels
from sbp.passes.physical.order import turns
from sbp.passes.physical.program import Box, Version


class Alike:
    """Every tensor has as many bytes as its number says."""

    def bytes(self, version: Version) -> float:
        return float(version[0])

    def shape(self, value: int) -> tuple[int, ...]:
        return ()


def version(n: int) -> Version:
    return n, ()


def op(
    kind: Fusing, reads: list[int], writes: list[int], product: bool = False, sends: bool = False
) -> KernelOp:
    return KernelOp(kind, [*map(version, reads)], [*map(version, writes)], product=product, sends=sends)


def ordered(
    ops: list[KernelOp], kept: list[int], collective: float | None = 1.0, sent: list[KernelOp] | None = None
) -> list[int]:
    """The ops in the order in which they begin; a product takes a second."""

    def seconds(op: KernelOp) -> float:
        return collective if op.sends and collective is not None else 1.0

    sizes: Any = Alike()
    k: Kernels = kernels(ops, sizes, [*map(version, kept)], [version(1)])
    at_rest = {t for t in k.tensors if t.maker < 0}
    turn = turns(k, at_rest, None if collective is None else seconds, sent or [])
    for t in k.tensors:
        assert all(turn.born[t.maker] <= turn.read[r] for r in t.readers if t.maker >= 0)
        late = {id(op) for op in sent or []}
        readers = [r for r in t.readers if r == k.end or id(ops[r]) not in late]
        assert all(turn.born[t.maker] < turn.read[r] for r in readers if t.maker >= 0)
    return [i for i in sorted(range(len(ops)), key=turn.born.__getitem__) if k.runs(i)]


def product(reads: list[int], writes: list[int]) -> KernelOp:
    return op(Fusing.CALL, reads, writes, product=True)


def backward(sends: bool) -> list[KernelOp]:
    """Three layers: of each the gradient of its weights, and then that of its input, which may be sent."""
    return [
        product([1], [10]),
        product([10, 1], [20]),
        product([10], [11]),
        op(Fusing.CALL, [11], [12], sends=sends),
        product([12, 1], [21]),
        product([12], [13]),
        op(Fusing.CALL, [13], [14], sends=sends),
        product([14], [15]),
        product([15, 1], [22]),
    ]


@pytest.mark.parametrize(
    ("sends", "collective", "order"),
    [
        (False, 1.0, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        # Each collective has a product beside it, the last one that is ready; the first has none left.
        (True, 0.5, [0, 2, 3, 1, 5, 6, 4, 7, 8]),
        # The last collective takes all.
        (True, 2.5, [0, 2, 3, 5, 6, 1, 4, 7, 8]),
        (True, None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_what_nobody_waits_for_comes_beside_collectives(
    sends: bool, collective: float | None, order: list[int]
) -> None:
    assert ordered(backward(sends), [20, 21, 22], collective) == order


def test_what_the_trip_before_has_left_is_sent_first() -> None:
    ops = [product([1], [10]), op(Fusing.CALL, [10], [11], sends=True), op(Fusing.CALL, [11], [12])]
    assert ordered(ops, [12], 1.0) == [0, 1, 2]
    assert ordered(ops, [10, 12], 1.0, [ops[1]]) == [1, 0, 2]


def test_what_is_made_of_little_is_made_late_and_what_frees_early() -> None:
    # A large tensor of a small one, read at the end; and a small one of a large one.
    large = [op(Fusing.LOOP, [1], [9]), product([1], [5]), product([5], [6]), op(Fusing.CALL, [9, 6], [2])]
    assert ordered(large, [2]) == [1, 2, 0, 3]
    small = [product([1], [9]), product([1], [5]), product([5], [6]), op(Fusing.ROOT, [9], [3])]
    assert ordered(small, [3, 6]) == [0, 3, 1, 2]


def test_a_product_that_frees_more_than_it_makes_runs_early() -> None:
    """As the gradient of the values of attention, which is the last to read the weights."""

    def named(read: list[int], made: list[int]) -> KernelOp:
        found = product(read, made)
        found.name = "dot_general"
        return found

    ops = [named([1], [9]), named([9], [5]), named([5], [8]), named([8, 5], [3]), named([9], [2])]
    assert ordered(ops, [2, 3]) == [0, 4, 1, 2, 3]
    # What it makes is more than what it frees: it has its turn.
    ops[-1] = named([9], [10])
    assert ordered(ops, [10, 3]) == [0, 1, 2, 3, 4]


def test_what_nobody_reads_has_its_turn() -> None:
    sizes: Any = Alike()
    k = kernels([op(Fusing.LOOP, [], [9]), product([1], [2])], sizes, [version(2)], [version(1)])
    k.writes[0].append(Buffer(version(9), 9.0, 0, written=True))  # type: ignore[attr-defined]
    assert turns(k, set(), None).born[:2] == [0, 1]


MB = 1_000_000


def scattered(sizes: list[int], chained: bool) -> list[KernelOp]:
    """Per size a product and its reduce-scatter; in a chain each product waits for the one before."""
    ops, before = list[KernelOp](), version(1)
    for k, size in enumerate(sizes):
        n = size * MB + k
        move = Move("reduce_scatter", (0,), (P,), (S(0),), P, S(0))
        part, whole = (n, (P,)), (n, (S(0),))
        ops.append(KernelOp(Fusing.CALL, [before], [part], product=True))
        ops.append(KernelOp(Fusing.CALL, [part], [whole], sends=True, step=Box(n, move, -1), combines="x"))
        before = whole if chained else before
    return ops


@pytest.mark.parametrize(
    ("sizes", "chained", "expected"),
    [
        # Products first, then all that is sent as one.
        ([5, 6, 7], False, [0, 2, 4, 1, 3, 5]),
        # As much as fits into one.
        ([20, 20, 6], False, [0, 1, 2, 4, 3, 5]),
        # What waits for another one cannot go with it.
        ([5, 6, 7], True, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_reduce_scatters_are_sent_together(sizes: list[int], chained: bool, expected: list[int]) -> None:
    ops = scattered(sizes, chained)
    sizes_of: Any = Alike()
    k = kernels(ops, sizes_of, [v for op in ops[1::2] for v in op.writes], [version(1)])
    turn = turns(k, [t for t in k.tensors if t.maker < 0], None)
    assert sorted(range(len(ops)), key=turn.born.__getitem__) == expected
    assert not turn.packed_reductions
