"""In which order kernels run."""

from typing import Any

import pytest

from sbp.passes.physical.fusing import Fusing, KernelOp
from sbp.passes.physical.kernels import Kernels, kernels
from sbp.passes.physical.order import turns
from sbp.passes.physical.program import Version


class Alike:
    """Every tensor has as many bytes as its number says."""

    def bytes(self, version: Version) -> float:
        return float(version[0])


def version(n: int) -> Version:
    return n, ()


def op(
    kind: Fusing, reads: list[int], writes: list[int], product: bool = False, sends: bool = False
) -> KernelOp:
    return KernelOp(kind, [*map(version, reads)], [*map(version, writes)], product=product, sends=sends)


def ordered(ops: list[KernelOp], kept: list[int], hiding: bool = True, sending: bool = False) -> list[int]:
    """The ops in the order in which they run."""
    sizes: Any = Alike()
    k: Kernels = kernels(ops, sizes, [*map(version, kept)], [version(1)])
    turn = turns(k, {t for t in k.tensors if t.maker < 0}, (), hiding, sending)
    assert sorted(turn) == list(range(len(ops) + 1))
    for t in k.tensors:
        assert all(turn[t.maker] < turn[r] for r in t.readers if t.maker >= 0)
    return [i for i in sorted(range(len(ops)), key=turn.__getitem__) if k.runs(i)]


def product(reads: list[int], writes: list[int]) -> KernelOp:
    return op(Fusing.CALL, reads, writes, product=True)


def backward(sends: bool) -> list[KernelOp]:
    """Two layers: of each the gradient of its weights, then that of its input, which may be sent."""
    return [
        product([1], [10]),
        op(Fusing.CALL, [10], [11], sends=sends),
        product([10, 1], [20]),
        product([11], [12]),
        product([12, 1], [21]),
    ]


@pytest.mark.parametrize(
    ("sends", "hiding", "sending", "order"),
    [
        (False, True, False, [0, 1, 2, 3, 4]),
        (True, True, False, [0, 1, 3, 2, 4]),
        (True, False, False, [0, 1, 2, 3, 4]),
        (False, True, True, [0, 1, 3, 2, 4]),
    ],
)
def test_what_nobody_waits_for_comes_last_where_it_hides_a_collective(
    sends: bool, hiding: bool, sending: bool, order: list[int]
) -> None:
    assert ordered(backward(sends), [20, 21], hiding, sending) == order


def test_what_follows_a_late_product_is_late() -> None:
    ops = [*backward(True)[:3], op(Fusing.LOOP, [20], [19]), *backward(True)[3:]]
    assert ordered(ops, [19, 21]) == [0, 1, 4, 2, 3, 5]


def test_what_is_made_of_little_is_made_late_and_what_frees_early() -> None:
    # A large tensor of a small one, read at the end; and a small one of a large one.
    large = [op(Fusing.LOOP, [1], [9]), product([1], [5]), product([5], [6]), op(Fusing.CALL, [9, 6], [2])]
    assert ordered(large, [2]) == [1, 2, 0, 3]
    small = [product([1], [9]), product([1], [5]), product([5], [6]), op(Fusing.ROOT, [9], [3])]
    assert ordered(small, [3, 6]) == [0, 3, 1, 2]
