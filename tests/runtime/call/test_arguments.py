"""Leaves of a call: what they are to the compiler, which of them come back, and which cannot be taken."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.errors import Problem
from sbp.runtime.call.arguments import (
    abstract,
    check_leaf,
    check_static,
    is_weak,
    leaves_key,
    struct,
)

NAMES = ("a", "b", "c")


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


def test_what_is_seen_alike_is_alike() -> None:
    """The quick look at leaves tells apart all that the slow one does, and passes on what it must look at."""
    leaves = [leaf for leaf, *_ in ABSTRACT.values() if not isinstance(leaf, jax.ShapeDtypeStruct)]
    looked = [leaves_key([leaf]) for leaf in leaves]
    assert None not in looked
    for a, b in itertools.combinations(range(len(leaves)), 2):
        assert looked[a] != looked[b] or abstract(leaves[a]) == abstract(leaves[b])


LOOKED_AT: dict[str, Any] = {
    "text": "text",
    "None": None,
    "a shape": shape(2),
    "wide": 2**31,
    "an array of wide ones": np.array([2**31]),
    "an object": object(),
}


@pytest.mark.parametrize("leaf", LOOKED_AT.values(), ids=LOOKED_AT)
def test_what_must_be_looked_at(leaf: Any) -> None:
    assert leaves_key([jnp.ones(2), leaf]) is None


def test_a_traced_value_must_be_looked_at() -> None:
    found = []
    jax.make_jaxpr(lambda x: found.append(leaves_key([x])))(1.0)
    assert found == [None]


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


def test_static_values_are_hashed() -> None:
    assert list(check_static([(0, int, 3), (2, tuple, (1, "a"))])) == []
    (found,) = check_static([(1, list, [3])])
    assert found.where == "static argument 1"
