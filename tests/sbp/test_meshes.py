"""A `jax.sharding.Mesh` wherever a placement is wanted: every public function and method that takes one."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import B, Placement, S
from sbp.annotation import placement_in, scope_of
from sbp.placement import as_placement
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


def begun(placement: Any) -> Any:
    return {
        n: x.sharding for n, x in embedding.Collection([TABLE]).init(jax.random.key(0), placement).items()
    }


def held(placement: Any) -> Any:
    tables, ids = embedding.Collection([TABLE]), {"day": jnp.zeros(8, jnp.int32)}
    two = embedding.accumulate(tables, sbp.rows(optax.sgd(0.1)), 2)
    return two.in_sbp(placement, two.init(tables.init(jax.random.key(0)), ids))


TAKES: dict[str, Callable[[Any], Any]] = {
    "sbp.compile": compiled,
    "sbp.annotate": annotated,
    "sbp.on": staged,
    "sbp.embedding.choose": chosen,
    "sbp.embedding.Accumulation.in_sbp": held,
    "sbp.embedding.Collection.in_sbp": signed,
    "sbp.embedding.Collection.init": begun,
    "sbp.embedding.Collection.places": lambda placement: embedding.Collection([TABLE]).places(placement),
    "sbp.embedding.Collection.shardings": lambda placement: embedding.Collection([TABLE]).shardings(
        placement
    ),
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


AXES = (2, 4), ("data", "model")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
TYPES = ((AUTO, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT))


def gridded(x: Any) -> Any:
    return 2 * x, x.sum(0)


def staged_grid(grid: Any) -> Any:
    """A program in two stages, each of which gives a result."""
    first, second = as_placement(grid, "here").split("data")

    def fn(x: Any) -> Any:
        with sbp.on(first):
            y = jnp.tanh(x)
        with sbp.on(second):
            return y, y.sum(0)

    return sbp.compile(fn, grid)


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_results_lie_on_the_users_own_mesh(types: Any) -> None:
    mesh = jax.make_mesh(*AXES, axis_types=types)
    mine = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, Spec("data", "model")))
    program = sbp.compile(gridded, mesh, in_sbp=[S(0), S(1)])
    for given in (mine, np.ones((8, 16), np.float32)):
        double, total = program(given)
        assert double.sharding.mesh == total.sharding.mesh == mesh
        assert {x.sharding.mesh for x in program.abstract_args} == {mesh}
        (double + mine).block_until_ready()
        jax.jit(lambda a, b, c: (a * b, c + 1))(double, mine, total)
        with jax.set_mesh(mesh):
            (double * mine + 1).block_until_ready()
            jax.grad(lambda a: (jnp.tanh(a) * mine).sum())(double)


@pytest.mark.parametrize("types", TYPES[:2], ids=str)
def test_stages_keep_the_types_of_axes(types: Any) -> None:
    y, total = staged_grid(jax.make_mesh(*AXES, axis_types=types))(np.ones((8, 16), np.float32))
    assert y.sharding.mesh.axis_types == total.sharding.mesh.axis_types == types[1:]


def test_without_a_mesh_of_its_own_a_program_gives_arrays_that_mix_with_its_arguments() -> None:
    program = sbp.compile(gridded, sbp.placement("cpu", shape=(2, 4)), in_sbp=[S(0), S(1)])
    host = np.ones((8, 16), np.float32)
    for types in (EXPLICIT, AUTO, EXPLICIT):
        mesh = jax.make_mesh(*AXES, axis_types=(types, types))
        theirs = jax.device_put(host, NamedSharding(mesh, Spec("data", "model")))
        ours, _ = program(theirs)
        assert (ours + theirs).sharding == theirs.sharding
        assert program(ours)[0].sharding == theirs.sharding
        assert program.plan(
            jax.ShapeDtypeStruct(theirs.shape, theirs.dtype, sharding=theirs.sharding)
        ).placement.mesh.axis_types == (types, types)
    plain, _ = program(host)
    jax.grad(lambda a: (jnp.tanh(a) @ host.T).sum())(plain)  # which no explicit mesh takes outside of itself


def test_stages_give_arrays_that_mix_with_their_arguments() -> None:
    mesh = jax.make_mesh(*AXES)
    given = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, Spec()))
    program = staged_grid(sbp.placement("cpu", shape=(2, 4)))
    assert {y.sharding.mesh.axis_types for y in program(given)} == {(EXPLICIT,)}
    assert {y.sharding.mesh.axis_types for y in program(np.ones((8, 16), np.float32))} == {(AUTO,)}


@pytest.mark.parametrize("types", TYPES, ids=str)
def test_arrays_of_another_mesh_over_the_same_devices_are_taken(types: Any) -> None:
    x = np.arange(128, dtype=np.float32).reshape(8, 16)
    given = jax.device_put(x, NamedSharding(jax.make_mesh(*AXES, axis_types=types), Spec("data", "model")))
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(2, 4)), in_sbp=[S(0), S(1)])
    np.testing.assert_array_equal(program(given), 2 * x)
    donating = sbp.compile(lambda x: x * 2, program.placement, in_sbp=[S(0), S(1)], donate_argnums=0)
    np.testing.assert_array_equal(donating(given), 2 * x)
    assert given.is_deleted()


def test_types_are_given_to_a_placement_too() -> None:
    plain = sbp.placement("cpu", shape=(2, 4))
    auto = sbp.placement("cpu", shape=(2, 4), axis_types=AUTO)
    mixed = sbp.placement("cpu", shape=(2, 4), axis_types=(AUTO, EXPLICIT))
    assert plain == auto == mixed  # they compute the same
    assert plain.mesh == auto.mesh
    assert auto.mesh.axis_types == (AUTO, AUTO)
    assert [p.mesh.axis_types for p in mixed.split("data")] == [(EXPLICIT,)] * 2
    assert [p.mesh.axis_types for p in mixed.split("model")] == [(AUTO,)] * 4
    for p in (plain, auto, mixed):
        assert Placement.from_mesh(p.mesh).mesh == p.mesh
        found = placement_in(scope_of(p))
        assert found is not None
        assert found.mesh == p.mesh


@pytest.mark.parametrize("wrong", [AxisType.Manual, (AUTO,), "auto", 3], ids=str)
def test_other_types_are_refused(wrong: Any) -> None:
    with pytest.raises(sbp.SbpError, match=r"AxisType.Explicit or AxisType.Auto, one for all"):
        sbp.placement("cpu", shape=(2, 4), axis_types=wrong)
