"""Leaves of a call: what they are to the compiler, which of them come back, and which cannot be taken."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import Problem
from sbp.runtime.arguments import (
    abstract,
    check_donated,
    check_leaf,
    check_static,
    is_weak,
    positions,
    struct,
    ties,
)
from sbp.signature import B, NdSbp, S

NAMES = ("a", "b", "c")


class Pair(NamedTuple):
    w: Any
    b: Any


def shape(*sizes: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def problem(leaf: Any, *, concrete: bool = True) -> Problem | None:
    return check_leaf(leaf, 1, lambda: NAMES, concrete)


ABSTRACT = {
    "array": (jnp.ones((2, 3), jnp.bfloat16), (2, 3), "bfloat16", False),
    "weak array": (jnp.asarray(2.0), (), "float32", True),
    "numpy": (np.ones((2, 3)), (2, 3), "float32", False),
    "numpy integers": (np.arange(3), (3,), "int32", False),
    "numpy number": (np.float64(3), (), "float32", False),
    "shape": (shape(4, dtype=np.int32), (4,), "int32", False),
    "bool": (True, (), "bool", False),
    "int": (3, (), "int32", True),
    "float": (3.0, (), "float32", True),
    "complex": (3j, (), "complex64", True),
    "key": (jax.random.key(0), (), "key<fry>", False),
    "keys": (jax.random.split(jax.random.key(0), 3), (3,), "key<fry>", False),
    "empty": (np.zeros((0, 4), np.float16), (0, 4), "float16", False),
}


@pytest.mark.parametrize("name", ABSTRACT)
def test_leaves_are_what_jit_sees(name: str) -> None:
    leaf, sizes, dtype, weak = ABSTRACT[name]
    found = abstract(leaf)
    assert (found[0], str(found[1]), found[2]) == (sizes, dtype, weak)
    assert problem(leaf, concrete=False) is None
    seen = []
    jax.eval_shape(lambda x: seen.append(jax.typeof(x)), leaf)
    made = struct(found)
    assert (made.shape, made.dtype, made.weak_type) == (seen[0].shape, seen[0].dtype, seen[0].weak_type)


def test_a_shape_of_a_wide_type_is_narrow() -> None:
    assert str(abstract(shape(4, dtype=np.int64))[1]) == "int32"


def test_what_is_weak() -> None:
    assert is_weak(1.0)
    assert not any(map(is_weak, (jnp.ones(2), np.ones(2), "s", None)))


@pytest.mark.usefixtures("x64")
def test_wide_integers_stay_wide() -> None:
    assert problem(np.array([2**40])) is None
    assert problem(2**40) is None
    assert str(abstract(np.array([2**40]))[1]) == "int64"


@pytest.mark.parametrize(
    "leaf",
    [
        np.array([2**31]),
        np.array([-(2**31) - 1]),
        np.array([2**32], np.uint64),
        np.int64(2**31),
        2**31,
        2**70,
        np.array([None]),
        np.array(["a"]),
        np.zeros(2, "datetime64[s]"),
        "text",
        object(),
        shape(2),
    ],
    ids=lambda leaf: type(leaf).__name__ if type(leaf) is object else repr(leaf),
)
def test_leaves_that_cannot_run(leaf: Any) -> None:
    found = problem(leaf)
    assert found is not None
    assert (found.kind, found.where) == ("argument", "b")


@pytest.mark.parametrize(
    "leaf",
    [np.array([2**31 - 1, -(2**31)]), np.array([2**32 - 1], np.uint64), np.zeros(0, np.int64), 2**31 - 1],
    ids=lambda leaf: type(leaf).__name__ if type(leaf) is object else repr(leaf),
)
def test_wide_types_with_narrow_values_fit(leaf: Any) -> None:
    assert problem(leaf) is None


def test_tracers_and_deleted_arrays() -> None:
    found: list[Problem | None] = []
    jax.make_jaxpr(lambda x: found.append(problem(x)))(1.0)
    gone = jnp.ones(3) + 1
    gone.delete()
    found.append(problem(gone))
    assert [p.kind for p in found if p] == ["argument", "donation"]


def test_an_array_is_donated_once() -> None:
    x, y = jnp.ones(3), jnp.ones(3)

    def wrong(leaves: list[Any], donate: tuple[int, ...]) -> list[tuple[str, str]]:
        return [(p.where, p.got) for p in check_donated(leaves, donate, lambda: NAMES)]

    assert wrong([x, y, 2.0], (0, 1)) == []
    assert wrong([x, x, y], ()) == wrong([x, x, y], (2,)) == []
    twice = [("b: float32[3]", "the same array as a")]
    assert wrong([x, x, y], (0,)) == wrong([x, x, y], (1,)) == twice
    assert len(wrong([x, x, x], (0,))) == 2


def test_positions() -> None:
    def f(a: Any, b: Any, *, c: Any) -> Any: ...
    def g(a: Any, *rest: Any) -> Any: ...

    assert positions(1, f, "static_argnums") == ((1,), [])
    assert positions((-1, 0), f, "static_argnums") == ((-1, 0), [])
    assert [p.got for p in positions((2, -3, 1), f, "static_argnums")[1]] == ["position 2", "position -3"]
    assert positions(9, g, "static_argnums") == ((9,), [])
    assert positions((0, 3), jnp.add, "donate_argnums")[0] == (0, 3)


def test_static_values_are_hashed() -> None:
    assert list(check_static([(0, int, 3), (2, tuple, (1, "a"))])) == []
    (found,) = check_static([(1, list, [3])])
    assert found.where == "static argument 1"


M, V = shape(8, 8), shape(8)
STATE = ({"w": M, "b": V}, Pair(M, V), M)
OPEN: list[NdSbp | None] = [None] * 8


def test_state_is_tied_to_the_argument_that_it_was() -> None:
    assert ties(STATE, STATE, OPEN[:5]) == (0, 1, 2, 3, 4)
    assert ties(STATE, (STATE[1], shape(), STATE[0]), OPEN[:5]) == (2, 3, None, 0, 1)
    # A named tuple is one result, not a tuple of results.
    assert ties((Pair(M, V), M), Pair(M, V), OPEN[:2]) == (0, 1)
    assert ties((M,), M, OPEN[:1]) == (0,)


def test_each_argument_is_taken_once_and_only_by_its_equal() -> None:
    assert ties((M, M), (M, M, M), OPEN[:3]) == (0, 1, None)
    assert ties((M, V), (shape(8, 4), shape(8, dtype=np.int32)), OPEN[:2]) == (None, None)
    assert ties(({"w": M},), ({"v": M},), OPEN[:1]) == (None,)
    assert ties((), (), ()) == ()
    assert ties(({}, M), ({}, M), OPEN[:1]) == (0,)


def test_a_given_signature_unties_its_leaf_alone() -> None:
    given = (S(0), B)
    assert ties(({"w": M, "b": V},), {"w": M, "b": V}, [None, given]) == (0, None)
    # A result whose leaves are all given takes nobody's argument.
    assert ties((M,), (M, M), [given, None]) == (None, 0)
