"""Keys are equal for equal things, and for those only."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from sbp.compat.core import make_op
from sbp.compat.exact_keys import Same, key_of
from sbp.passes.plan.candidates import enumerate_candidates
from sbp.passes.program.trace import Builder, trace
from sbp.placement import placement
from sbp.rules import REGISTRY, Op, Row, Rule
from sbp.signature import S


def double(x: Any) -> Any:
    return 2 * x


@dataclass
class Loose:
    """It has `==`, and so no hash."""

    a: Any


class Mask:
    """A parameter as JAX wants it, with a hash; its text is short, as that of a large array."""

    def __init__(self, bits: Any) -> None:
        self.bits = bits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and bool((self.bits == other.bits).all())

    def __hash__(self) -> int:
        return hash(self.bits.tobytes())

    def __repr__(self) -> str:
        return f"Mask({self.bits})"


BIG = np.zeros(10_000)
OTHER = BIG.copy()
OTHER[5_000] = 1.0  # which `repr` leaves out

# Of each group all are alike; no two of different groups are.
GROUPS: list[list[Any]] = [
    [BIG, BIG.copy()],
    [OTHER, OTHER.copy()],
    [BIG.astype(np.float32)],
    [BIG.reshape(100, 100)],
    [[BIG], [BIG.copy()]],
    [(BIG,)],
    [{"a": BIG, "b": 1}, {"b": 1, "a": BIG.copy()}],
    [{"a": OTHER, "b": 1}],
    [1],
    [True],
    [1.0],
    [0.0],
    [-0.0],
    [float("nan"), float("nan")],
    [np.float32(1), np.float32(1)],
    [np.int32(1)],
    [1j],
    ["1"],
    [None],
    [()],
    [double],
    [functools.partial(double)],
    [Loose(1), Loose(1)],
    [Loose(2)],
    [Loose(BIG)],
    [Loose(OTHER)],
    [np.dtype("float32"), np.dtype("float32")],
    [lax.GatherDimensionNumbers((0,), (0,), (0,)), lax.GatherDimensionNumbers((0,), (0,), (0,))],
    [lax.GatherDimensionNumbers((0,), (0,), (1,))],
    [slice(0, 1)],
]


def test_keys_are_exact() -> None:
    keys = [[key_of(x) for x in group] for group in GROUPS]
    for group in keys:
        assert len(set(group)) == 1
    for (i, a), (j, b) in itertools.combinations(enumerate(keys), 2):
        assert a[0] != b[0], (GROUPS[i], GROUPS[j])


def test_what_has_no_key_is_itself_and_lives() -> None:
    x, y = np.array([object()]), np.array([object()])
    assert (key_of(x) == key_of(x), key_of(x) == key_of(y)) == (True, False)
    assert isinstance(key_of(x), Same)


def test_constants_are_told_apart_even_if_one_is_gone() -> None:
    """The address of an array that nobody holds is given to the next one."""
    b = Builder()
    values = [b.const(np.full(4, i)) for i in range(50)]
    assert len(set(values)) == 50
    assert [int(c[0]) for c in b.consts] == list(range(50))
    kept = np.arange(3)
    assert b.const(kept) == b.const(kept)


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_large_constants_that_differ_in_the_middle(make: Any) -> None:
    x = np.zeros(5000, np.float32)
    graph = trace(lambda x: (x + make(BIG[:5000]), x + make(OTHER[2500:7500])), [x], {}).graph
    assert [float(c.sum()) for c in graph.consts] == [0.0, 1.0]


def test_ops_that_differ_in_the_middle_of_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ops are enumerated once: what is equal must be so to the last element."""
    picky = make_op("picky", lambda x, mask: [x * 2])

    def rows(op: Op) -> list[Row]:
        return [] if op.params["mask"].bits.any() else [Row((S(0),), (S(0),))]

    monkeypatch.setitem(REGISTRY, "picky", Rule("picky", rows))
    graph = trace(lambda x: [picky.bind(x, mask=Mask(m))[0] for m in (BIG, OTHER)], [np.zeros(8)], {}).graph
    found = enumerate_candidates(graph, placement("cpu", shape=(8,)), {})
    assert [len(found.strategies[n.id]) for n in graph.nodes] == [2, 1]
