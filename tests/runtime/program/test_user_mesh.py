"""A mesh that the user has set changes nothing of what a program does, whatever it is a mesh of."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import B, S
from sbp.runtime.embedding import Collection, FeatureConfig, TableConfig

pytestmark = pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")

GRID = sbp.placement("cpu", shape=(2, 4))
AXES = ("data", "model")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype(np.float32)
PARAMS = {
    "up": RNG.normal(size=(16, 32)).astype(np.float32),
    "down": RNG.normal(size=(32, 8)).astype(np.float32),
}
LAYOUT = {"up": [B, S(1)], "down": [B, S(0)]}
TABLES = Collection([FeatureConfig("f", TableConfig("t", 40, 8), (None, 3))])


def mesh(*types: AxisType) -> Mesh:
    return jax.make_mesh((2, 4), AXES, axis_types=types)


def legacy() -> Any:
    """`with mesh:`, which JAX has deprecated."""
    return mesh(AxisType.Auto, AxisType.Auto)


AMBIENT: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "auto": lambda: jax.set_mesh(mesh(AxisType.Auto, AxisType.Auto)),
    "explicit": lambda: jax.set_mesh(mesh(AxisType.Explicit, AxisType.Explicit)),
    "mixed": lambda: jax.set_mesh(mesh(AxisType.Auto, AxisType.Explicit)),
    "other names": lambda: jax.set_mesh(jax.make_mesh((8,), ("other",))),
    "fewer devices": lambda: jax.set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))),
    "manual": lambda: jax.sharding.use_abstract_mesh(
        AbstractMesh((2, 4), AXES, axis_types=(AxisType.Manual, AxisType.Explicit))
    ),
    "legacy": legacy,
}


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["up"])


def loss(params: Any, x: Any) -> Any:
    return jnp.mean(jnp.square(hidden(params, x) @ params["down"]))


def train(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def staged(params: Any, x: Any) -> Any:
    """The loss in two stages."""
    first, second = GRID.split("data")
    with sbp.on(first):
        h = hidden(params, x)
    with sbp.on(second):
        return jnp.mean(jnp.square(h @ params["down"]))


def looked_up(params: Any, ids: Any) -> Any:
    return jax.value_and_grad(lambda p: jnp.sum(TABLES(p, {"f": ids})["f"] ** 2))(params)


class Programs:
    """Programs that all tests here share, and what they give without a mesh."""

    def __init__(self) -> None:
        self.pinned = sbp.compile(train, GRID, in_sbp=(LAYOUT, [S(0), B]))
        self.staged = sbp.compile(sbp.microbatch(jax.value_and_grad(staged), 2, batch_args=1), GRID)
        self.lookup = sbp.compile(looked_up, GRID)
        self.tables = TABLES.init(jax.random.key(0))
        self.ids = RNG.integers(0, 40, size=(8, 3)).astype(np.int32)
        self.expected = jax.jit(train)(PARAMS, X)
        self.vectors = jax.jit(looked_up)(self.tables, self.ids)


@pytest.fixture(scope="module")
def programs() -> Programs:
    return Programs()


def same(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def call(p: Programs, folder: Path) -> None:
    got = p.pinned(PARAMS, X)
    same(got, p.expected)
    same(p.pinned(*p.pinned.place(PARAMS, X)), p.expected)
    p.pinned(got[0], X)


def auto(p: Programs, folder: Path) -> None:
    plan = sbp.compile(train, GRID).plan(PARAMS, X)
    assert plan.gap == 0
    assert plan.what_if("params['up']", [B, S(1)]).collectives
    plan.save(folder / "plan.html")


def lowered(p: Programs, folder: Path) -> None:
    assert "all_reduce" in p.pinned.lower(PARAMS, X).as_text()
    assert "psum" in str(p.pinned.source(PARAMS, X))
    assert p.pinned.report(PARAMS, X).collectives


def verified(p: Programs, folder: Path) -> None:
    assert sbp.verify(p.pinned, PARAMS, X).outputs == 3


def trained(p: Programs, folder: Path) -> None:
    done = sbp.fit(p.pinned, (PARAMS,), lambda step: X, steps=2, checkpoint=folder, progress=False)
    found = sbp.restore(folder, like=done.state)
    same(sbp.to_host(found), done.state)


def loaded(p: Programs, folder: Path) -> None:
    p.pinned.save_executable(folder / "train.sbpx", PARAMS, X)
    program = sbp.load_executable(folder / "train.sbpx")
    same(program(PARAMS, X), p.expected)
    program(program(PARAMS, X)[0], X)


def embedded(p: Programs, folder: Path) -> None:
    same(p.lookup(p.tables, p.ids), p.vectors)


def pipelined(p: Programs, folder: Path) -> None:
    value, _ = p.staged(PARAMS, X)
    same(value, p.expected[1])


USES = (call, auto, lowered, verified, trained, loaded, embedded, pipelined)


@pytest.mark.parametrize("use", USES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ambient", AMBIENT)
def test_nothing_depends_on_the_users_mesh(
    ambient: str, use: Any, programs: Programs, tmp_path: Path
) -> None:
    with AMBIENT[ambient]():
        before = jax.sharding.get_abstract_mesh()
        use(programs, tmp_path)
        assert jax.sharding.get_abstract_mesh() == before


def test_what_was_built_under_one_mesh_serves_under_another(programs: Programs) -> None:
    grid = sbp.placement("cpu", shape=(2, 4), axis_types=AxisType.Explicit)
    program = sbp.compile(train, grid, in_sbp=(LAYOUT, [S(0), B]))
    plan = program.plan(PARAMS, X)
    for name in AMBIENT.keys() - {"legacy"}:  # which JAX counts among its settings
        with AMBIENT[name]():
            assert program.plan(PARAMS, X) is plan
    with AMBIENT["explicit"]():
        given = jax.device_put(X, Spec("data"))
        assert program.plan(PARAMS, given) is plan


@pytest.mark.parametrize("ambient", ["explicit", "auto", "none"])
def test_a_function_sees_the_mesh_and_the_types_that_its_user_has_set(ambient: str) -> None:
    seen: list[Any] = []

    def doubled(x: Any) -> Any:
        seen.append((jax.sharding.get_abstract_mesh(), jax.typeof(x).sharding.spec))
        return 2 * x

    with AMBIENT[ambient]():
        there = jax.sharding.get_abstract_mesh()
        spec = Spec("data", "model")
        x = X if there.empty else jax.device_put(X, spec)
        same(sbp.compile(doubled, GRID, in_sbp=(spec,))(x), 2 * X)
        jax.make_jaxpr(doubled)(x)
    assert seen[0] == seen[1]
    assert seen[0][0] == there
    assert seen[0][1] == (spec if ambient == "explicit" else Spec(None, None))


def test_another_mesh_is_another_program_to_a_function_that_asks_for_it() -> None:
    program = sbp.compile(lambda x: x * jax.sharding.get_abstract_mesh().size, GRID)
    for ambient, size in (("explicit", 8), ("fewer devices", 2), ("explicit", 8)):
        with AMBIENT[ambient]():
            same(program(X), size * X)


REFUSED = {
    "contracted dims": lambda x: (x.T @ x, x @ x.T),
    "vmap": lambda x: jax.vmap(lambda r: jnp.tanh(r @ x.T))(x),
    "shapes": lambda x: (x.reshape(4, 2, 16), jnp.concatenate([x, x]), jnp.cumsum(x, 0)),
    "loops": lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ x.T @ x), c.sum()), x, None, length=2),
    "a loop's end": lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: c / 2, jnp.abs(x)),
    "a solver": lambda x: jax.scipy.sparse.linalg.cg(lambda v: x.T @ (x @ v) + v, x.sum(0), maxiter=2)[0],
    "ids": lambda x: (
        x[jnp.arange(4) % 3],
        x.at[jnp.arange(3)].add(1.0),
        jnp.take_along_axis(x, (x > 0).astype(int), 1),
    ),
}


@pytest.mark.parametrize("spec", [Spec("data", "model"), Spec(("data", "model"))], ids=str)
def test_what_types_with_shardings_cannot_do_is_done(spec: Any) -> None:
    for name, fn in REFUSED.items():
        expected = jax.jit(fn)(X)
        with AMBIENT["explicit"]():
            got = sbp.compile(fn, GRID, in_sbp=(spec,))(jax.device_put(X, spec))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("ambient", ["explicit", "auto"])
def test_a_shard_map_inside_takes_its_mesh_from_around(ambient: str) -> None:
    def summed(x: Any) -> Any:
        total = jax.shard_map(
            lambda part: jax.lax.psum(part, "model"),
            in_specs=Spec(None, "model"),
            out_specs=Spec(),
            axis_names={"model"},
        )
        return total(x) * 2

    with AMBIENT[ambient]():
        spec = Spec(None, "model")
        x = jax.device_put(X, spec)
        same(sbp.compile(summed, GRID, in_sbp=(spec,))(x), 2 * X.reshape(8, 4, 4).sum(1))


def test_closed_over_arrays_of_the_users_mesh_are_taken() -> None:
    with AMBIENT["explicit"]() as _:
        held = jax.device_put(X, NamedSharding(jax.sharding.get_mesh(), Spec("data")))
        same(sbp.compile(lambda x: x + held, GRID)(X), 2 * X)
