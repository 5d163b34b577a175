"""Signatures of arguments and results: every form of a leaf, every kind of prefix, and what is refused."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from sbp.errors import Problem
from sbp.notation.resolve import from_partition_spec, is_leaf, resolve, to_partition_spec
from sbp.placement import placement
from sbp.signature import AUTO, B, P, S

GRID = placement("cpu", shape=(2, 4))
LINE = placement("cpu", shape=(8,))
FAR = placement("h100", shape=(16, 8))
NO_DEVICES = AbstractMesh((2, 4), ("data", "model"))
MATRIX = jax.ShapeDtypeStruct((8, 8), np.float32)


class Pair(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    w: Any
    b: Any


def signatures(prefix: Any, tree: Any, where: Any = GRID) -> list[Any]:
    """The signatures of a tree that fits its prefix."""
    paths = [f"leaf{i}" for i in range(len(jax.tree.leaves(tree)))]
    found, problems = resolve(prefix, tree, paths, where, "in_sbp")
    assert problems == []
    return found


def problems(prefix: Any, tree: Any = MATRIX, where: Any = GRID) -> list[Problem]:
    paths = [f"leaf{i}" for i in range(len(jax.tree.leaves(tree)))]
    found, wrong = resolve(prefix, tree, paths, where, "in_sbp")
    assert len(found) == len(paths)
    return wrong


LEAVES = {
    "list": ([S(0), B], (S(0), B)),
    "negative dim": ([B, S(-1)], (B, S(1))),
    "nested split": ([S(1), S(1)], (S(1), S(1))),
    "spec": (Spec("data"), (S(0), B)),
    "spec with a gap": (Spec(None, "model"), (B, S(1))),
    "spec of two axes in one dim": (Spec(("data", "model")), (S(0), S(0))),
    "spec of all dims": (Spec("model", "data"), (S(1), S(0))),
    "empty spec": (Spec(), (B, B)),
    "sharding": (NamedSharding(GRID.mesh, Spec("data")), (S(0), B)),
    "sharding without devices": (NamedSharding(NO_DEVICES, Spec("data")), (S(0), B)),
    "AUTO": (AUTO, None),
    "None": (None, None),
}


@pytest.mark.parametrize("form", LEAVES)
def test_every_form_of_a_leaf(form: str) -> None:
    given, expected = LEAVES[form]
    assert is_leaf(given)
    assert signatures(given, MATRIX) == [expected]


def test_a_bare_signature_on_one_axis() -> None:
    assert signatures(S(1), MATRIX, LINE) == [(S(1),)]
    assert signatures([S(0)], (MATRIX, MATRIX), LINE) == [(S(0),), (S(0),)]
    assert signatures(([S(0)], [B]), (MATRIX, MATRIX), LINE) == [(S(0),), (B,)]
    assert signatures((S(0), B), (MATRIX, MATRIX), LINE) == [(S(0),), (B,)]
    (longer, _) = problems([S(0), B], (MATRIX, MATRIX), LINE)
    assert longer.fix == "for one signature per argument write a tuple: (S(0), B)"


def test_a_tuple_is_always_a_container() -> None:
    """Of bare signatures, which on several axes are an error that says what to write; for one tensor, too."""
    first, second = problems((S(0), B), (MATRIX, MATRIX))
    assert (first.got, second.got) == ("[S(0)]: 1 signature", "[B]: 1 signature")
    assert (first.fix, second.fix) == ("for example [S(0), B]", "for example [B, B]")
    (one,) = problems(((S(0), B), AUTO), (MATRIX, MATRIX))
    assert (one.why, one.fix) == (
        "a tuple is a container, with an entry per tensor; a list is a signature",
        "[S(0), B]",
    )


def test_a_placement_without_devices_takes_abstract_shardings() -> None:
    sharding = NamedSharding(FAR.abstract_mesh, Spec(("data", "model")))
    assert signatures(sharding, MATRIX, FAR) == [(S(0), S(0))]
    (foreign,) = problems(NamedSharding(GRID.mesh, Spec("data")), MATRIX, FAR)
    assert foreign.legal == "a sharding on h100(data=16 x model=8)"


def test_a_prefix_covers_what_is_below_it() -> None:
    tree = ({"w": MATRIX, "b": MATRIX}, Pair(MATRIX, MATRIX), Layer(MATRIX, MATRIX), [MATRIX, None])
    split, whole = (S(0), B), (B, B)
    assert signatures(([S(0), B], AUTO, [B, B], None), tree) == [split, split, None, None, whole, whole, None]
    exact = ({"w": [S(0), B], "b": [B, B]}, Pair(AUTO, [B, B]), Layer([B, B], None), [[S(0), B], None])
    # The leaves of a dict come in the order of its keys.
    assert signatures(exact, tree) == [whole, split, None, whole, whole, None, split]
    assert signatures([S(0), B], tree) == [split] * 7


def test_a_named_tuple_of_bare_signatures_is_a_container() -> None:
    assert signatures(Pair(S(0), B), Pair(MATRIX, MATRIX), LINE) == [(S(0),), (B,)]
    assert not is_leaf(Pair(S(0), B))


def test_a_list_may_stand_for_a_tuple() -> None:
    assert signatures([[S(0), B], AUTO], (MATRIX, MATRIX)) == [(S(0), B), None]
    assert signatures(([S(0), B], AUTO), [MATRIX, MATRIX]) == [(S(0), B), None]


def test_empty_containers() -> None:
    assert signatures((), ()) == []
    assert signatures({}, {}) == []
    assert signatures([S(0), B], {}) == []
    assert signatures({"a": [B, B]}, {"a": None}) == []


MISFITS = {
    "odd keys": ({"w": AUTO, "c": AUTO}, {"w": MATRIX, "b": MATRIX}, "'c' is not there, 'b' has no entry"),
    "wrong length": ([AUTO] * 3, (MATRIX, MATRIX), "containers must match"),
    "container for a tensor": ({"w": AUTO}, MATRIX, "containers must match"),
    "dict for a tuple": ({"w": AUTO}, (MATRIX,), "containers must match"),
    "tuple for a named tuple": ((AUTO, AUTO), Pair(MATRIX, MATRIX), "containers must match"),
    "a name": ("data", (MATRIX, MATRIX), "a text is no signature"),
    "a device": (jax.devices("cpu")[0], MATRIX, "is none of them"),
    "a sharding of one device": (
        jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0]),
        MATRIX,
        "a SingleDeviceSharding is none of them",
    ),
    "mixed list": ([S(0), Spec("data")], MATRIX, "containers must match"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_prefixes_that_do_not_fit(name: str) -> None:
    prefix, tree, why = MISFITS[name]
    (problem,) = problems(prefix, tree)
    assert why in problem.why
    assert problem.where.startswith("in_sbp")


def test_all_misfits_are_found_with_their_paths() -> None:
    tree = ({"w": MATRIX, "b": MATRIX}, MATRIX, (MATRIX, MATRIX))
    found = problems(({"w": {"x": AUTO}, "b": "data"}, [S(2), B], (AUTO,)), tree)
    assert [p.where for p in found] == [
        "in_sbp[0]['b']",
        "in_sbp[0]['w']",
        "in_sbp[2]",
        "leaf2: float32[8, 8], in_sbp",
    ]


SPECS = {
    "inner axis first": (Spec(("model", "data")), "names an inner axis before an outer one"),
    "unknown axis": (Spec("batch"), "'batch' is not an axis of cpu(data=2 x model=4)"),
    "too long": (Spec("data", None, None), "3 entries for a tensor of 2 dims"),
    "unconstrained": (Spec(Spec.UNCONSTRAINED), "fixed for the whole tensor or chosen for the whole tensor"),
}


@pytest.mark.parametrize("name", SPECS)
def test_specs_that_are_refused(name: str) -> None:
    spec, why = SPECS[name]
    (problem,) = problems(spec)
    assert why in problem.why
    assert problem.got == str(spec)


def test_an_axis_splits_one_dim() -> None:
    nd, found = from_partition_spec(Spec("data", "data"), (8, 8), "x", GRID)
    assert nd is None
    assert [p.why for p in found] == ["'data' stands there twice"]


def test_specs_and_signatures_are_inverse() -> None:
    one_d = (B, S(0), S(1), S(2))
    for nd in [(a, b) for a in one_d for b in one_d]:
        spec = to_partition_spec(nd, 3, GRID)
        assert from_partition_spec(spec, (8, 8, 8), "x", GRID) == (nd, [])


def test_shardings_of_other_devices() -> None:
    devices = np.array(jax.devices("cpu"))
    for mesh in (
        Mesh(devices.reshape(4, 2), ("data", "model")),
        Mesh(devices.reshape(2, 4), ("a", "b")),
        Mesh(devices[::-1].reshape(2, 4), ("data", "model")),
    ):
        (problem,) = problems(NamedSharding(mesh, Spec()))
        assert problem.why == "the sharding's mesh has other axes, or other devices, or another order"


@pytest.mark.parametrize(
    ("given", "got"),
    [([S(0)], "1 signature"), ([S(0), B, B], "3 signatures"), ([S(3), B], "S(3)"), ([P, B], "[P, B]")],
)
def test_signatures_that_do_not_fit_the_tensor(given: Any, got: str) -> None:
    (problem,) = problems(given)
    assert got in problem.got
    assert problem.where == "leaf0: float32[8, 8], in_sbp"
