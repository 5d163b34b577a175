"""A `jax.sharding.Mesh` wherever a placement is wanted: every public function and method that takes one."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sbp
from sbp import B, S
from sbp.runtime import embedding

LINE = sbp.placement("cpu", ranks=[3, 1, 0, 2])
TABLE = embedding.FeatureConfig("day", embedding.TableConfig("day", 64, 8), (None,))


def compiled(placement: Any) -> Any:
    return sbp.compile(lambda x: x.sum(0), placement, in_sbp=[S(0)]).placement


def annotated(placement: Any) -> Any:
    def fn(x: Any) -> Any:
        return sbp.annotate(x, [B], placement=placement).sum(0)

    return str(sbp.compile(fn, LINE, in_sbp=[S(0)]).plan(jnp.ones((8, 2))))


def staged(placement: Any) -> Any:
    def fn(x: Any) -> Any:
        with sbp.on(placement):
            return x.sum(0)

    return str(sbp.compile(fn, LINE, in_sbp=[S(0)]).plan(jnp.ones((8, 2))))


def chosen(placement: Any) -> Any:
    choice = embedding.choose([TABLE], 64, placement, optimizer=sbp.rows(optax.sgd(0.1)))
    return choice.placement, str(choice)


def signed(placement: Any) -> Any:
    return embedding.Collection([TABLE]).in_sbp(placement)


TAKES: dict[str, Callable[[Any], Any]] = {
    "sbp.compile": compiled,
    "sbp.annotate": annotated,
    "sbp.on": staged,
    "sbp.embedding.choose": chosen,
    "sbp.embedding.Collection.in_sbp": signed,
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public function and method, with its name."""
    for path, names in (("sbp", sbp), ("sbp.embedding", embedding)):
        for name in names.__all__:
            found = getattr(names, name)
            if inspect.isclass(found):
                methods = inspect.getmembers(found, inspect.isfunction)
                yield from ((f"{path}.{name}.{m}", f) for m, f in methods if not m.startswith("_"))
            elif callable(found):
                yield f"{path}.{name}", found


def test_every_function_that_takes_a_placement_is_tried() -> None:
    takes = {name for name, f in public() if "placement" in inspect.signature(f).parameters}
    assert takes == TAKES.keys()


@pytest.mark.parametrize("name", TAKES)
def test_a_mesh_is_its_placement(name: str) -> None:
    assert TAKES[name](LINE.mesh) == TAKES[name](LINE)


@pytest.mark.parametrize("name", TAKES)
@pytest.mark.parametrize("wrong", ["cpu:4", 4, LINE.abstract_mesh, jax.devices("cpu")[:4]], ids=repr)
def test_nothing_else_is(name: str, wrong: Any) -> None:
    with pytest.raises(sbp.SbpError, match=r"an sbp.placement, or a jax.sharding.Mesh"):
        TAKES[name](wrong)
