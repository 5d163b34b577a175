"""A Program as its user sees it: called like the function, with the same results wherever its tensors lie."""

import functools
import gc
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

import sbp
from sbp import AUTO, B, S
from sbp.compat.core import is_key
from sbp.errors import DonationError, SbpError

GRID = sbp.placement("cpu", shape=(2, 4))
LINE = sbp.placement("cpu", shape=(8,))
CHECKED = sbp.Options(check=True)
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
ROWS: dict[str, Any] = {"in_sbp": ([S(0), B],)}


def words(x: Any) -> Any:
    return np.asarray(jax.random.key_data(x) if is_key(x.dtype) else x)


def same(fn: Any, *args: Any, static_argnums: Any = (), on: Any = GRID, **options: Any) -> Any:
    """Compares a program with `jit`: tree, shapes, dtypes, weakness and numbers. Returns the plan."""
    kwargs = options.pop("kwargs", {})
    expected = jax.jit(fn, static_argnums=static_argnums)(*args, **kwargs)
    program = sbp.compile(fn, on, static_argnums=static_argnums, options=CHECKED, **options)
    got = program(*args, **kwargs)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype, a.aval.weak_type) == (b.shape, b.dtype, b.aval.weak_type)
        np.testing.assert_allclose(words(a), words(b), rtol=2e-5, atol=1e-5)
    return program.plan(*args, **kwargs)


class Results(NamedTuple):
    value: Any
    nothing: Any = None


def doubled(a: Any) -> Any:
    """A kernel that nobody wrote a rule for."""

    def kernel(x: Any, out: Any) -> None:
        out[...] = 2 * x[...]

    shape = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True, name="double")(a)


KEY = jax.random.key(7)
TABLE = jnp.asarray(X)
# name -> (function, arguments, what else `compile` and the call are given)
FACES: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "keyword arguments": (lambda a, *, b, c=3: a * b + c, (X,), {"kwargs": {"b": X}, **ROWS}),
    "static argument": (lambda a, n: a * n if n > 2 else a, (X, 3), {"static_argnums": 1, **ROWS}),
    "static argument from the end": (lambda a, n: a * n, (X, 3), {"static_argnums": -1}),
    "static argument in front": (lambda n, a: a * n, (3, X), {"static_argnums": (0,), **ROWS}),
    "Python numbers": (lambda a, s, n, flag: (a * s, s, n + 1, jnp.where(flag, a, 0)), (X, 2.5, 3, True), {}),
    "numpy double": (lambda a: (a.T, a.sum()), (X.astype(np.float64),), {}),
    "constants as results": (lambda a: (a * 2, 1.0, 7, True, np.arange(3), jnp.zeros(3)), (X,), {}),
    "an argument as a result, thrice": (lambda a: (a, a, a + 1, {"again": a}), (X,), ROWS),
    "nothing in, nothing out": (lambda p: {"a": None, "b": p["x"]}, ({"x": X, "y": None},), {}),
    "empty trees": (lambda p: p, ({},), {}),
    "no argument": (lambda: (jnp.ones(3), 2), (), {}),
    "a named tuple": (lambda p: Results(p.value * 2), (Results(X),), {"in_sbp": (Results([S(0), B]),)}),
    "zero rows": (lambda a: (a + 1, a.sum(), a.sum(0)), (np.zeros((0, 8), np.float32),), ROWS),
    "no element at all": (
        lambda a, k: (
            lax.cumsum(a, 1),
            jnp.full((1, 8), 2).at[a].max(2),
            a.sum(),
            jax.vmap(jax.random.bits)(k),
        ),
        (np.zeros((0, 8), np.int32), jax.random.split(KEY, 0)),
        {"in_sbp": ([S(0), S(1)], sbp.AUTO)},
    ),
    "booleans": (lambda a: (~a, a.any(), a.sum(), a & a), (X > 0,), {"in_sbp": ([S(0), S(1)],)}),
    "integers": (lambda a: (sbp.annotate(a.sum(0), [sbp.P, B]) * 2,), (np.arange(64).reshape(8, 8),), ROWS),
    "half precision": (lambda a: jnp.tanh(a) * 2, (jnp.asarray(X, jnp.bfloat16),), ROWS),
    "complex": (lambda a: (a * 1j).sum(), (X,), ROWS),
    "a typed key": (lambda k: (jax.random.normal(k, (8, 8)), jax.random.fold_in(k, 3)), (KEY,), {}),
    "a raw key": (lambda k: jax.random.normal(k, (8, 8)), (jax.random.PRNGKey(7),), {}),
    "children of a raw key": (jax.random.split, (jax.random.PRNGKey(7),), {}),
    "split keys": (lambda k: (jax.vmap(jax.random.bits)(k), k), (jax.random.split(KEY, 8),), ROWS),
    "uneven keys": (jax.vmap(jax.random.bits), (jax.random.split(KEY, 5),), ROWS),
    "keys as results": (lambda k: (jax.random.split(k, 4), k), (KEY,), {}),
    "closed-over arrays": (lambda a: a @ X.T + TABLE @ TABLE.T + TABLE[0, 0], (X,), ROWS),
    "a closed-over key": (lambda a: a + jax.random.normal(KEY, (8, 16)), (X,), ROWS),
    "nested jit": (jax.jit(lambda a: jax.jit(jnp.sin)(a) * 2), (X,), ROWS),
    "donation inside": (lambda a: jax.jit(jnp.sin, donate_argnums=0)(a * 1) * 2, (X,), ROWS),
    "loops and branches": (
        lambda a: lax.cond(
            a[0, 0] > 0, lambda y: y * 2, lambda y: lax.fori_loop(0, 3, lambda i, c: c + y, y), a
        ),
        (X,),
        ROWS,
    ),
    "an op without a rule": (lambda a: doubled(a) + a, (X,), ROWS),
}


@pytest.mark.some(12, "uneven keys")
@pytest.mark.parametrize("name", FACES)
def test_a_program_is_called_like_the_function(name: str) -> None:
    fn, args, options = FACES[name]
    same(fn, *args, **options)


def test_ops_without_a_rule_are_noted() -> None:
    fn, args, options = FACES["an op without a rule"]
    notes = same(fn, *args, **options).notes
    assert any(n.startswith("no rule for pallas_call[double]: gathered (test_program.py:") for n in notes)


def test_as_a_decorator() -> None:
    @functools.partial(sbp.compile, placement=LINE, in_sbp=(S(0),))
    def double(x: Any) -> Any:
        """Twice as much."""
        return x * 2

    assert (double.__name__, double.__doc__) == ("double", "Twice as much.")
    assert repr(double) == "<Program double on cpu(x=8)>"
    assert double(X).sharding == NamedSharding(LINE.mesh, Spec("x"))


def test_one_program_per_abstract_signature() -> None:
    traces: list[Any] = []

    def f(x: Any, n: Any) -> Any:
        traces.append(x.dtype)
        return x * n

    program = sbp.compile(f, LINE, static_argnums=1)
    program.plan(jax.ShapeDtypeStruct((8, 16), np.float32), 2)
    program(X, 2), program(X.astype(np.float64), 2), program(jnp.asarray(X), 2)
    assert len(traces) == 1
    program.plan(X, 2.0), program.plan(X, 3), program.plan(X[:4], 2)
    assert len(traces) == 4
    with jax.enable_x64(True):
        program.plan(X.astype(np.float64), 2)
    assert traces[-1] == np.float64


def test_closed_over_arrays_are_placed_once() -> None:
    program = sbp.compile(lambda a: a @ TABLE.T, GRID)
    program(X)
    (built,) = program._built.values()
    (const,) = built.executable[2]
    program(X)
    assert built.executable[2][0] is const
    assert const.sharding.device_set == set(GRID.mesh.devices.flat)


optimizer = optax.adam(1e-2)


def train_step(params: Any, state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: ((batch @ p["w"] + p["b"]) ** 2).mean())(params)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def fresh() -> tuple[Any, Any]:
    params = {"w": jnp.asarray(X) * 1, "b": jnp.zeros(16)}
    return params, optimizer.init(params)


BATCH = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)
STATE: dict[str, Any] = {"in_sbp": ({"w": [S(1)], "b": AUTO}, AUTO, [S(0)])}


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("donate", [(), (0, 1)])
@pytest.mark.usefixtures("no_warnings")
def test_state_comes_back_as_it_came_and_a_loop_never_moves_it(donate: Any) -> None:
    program = sbp.compile(train_step, LINE, **STATE, donate_argnums=donate, options=CHECKED)
    (params, state), (expected, reference) = fresh(), fresh()
    seen = []
    for _ in range(3):
        params, state, loss = program(params, state, BATCH)
        expected, reference, wanted = jax.jit(train_step)(expected, reference, BATCH)
        seen.append([x.sharding for x in jax.tree.leaves((params, state))])
    assert seen[0] == seen[1] == seen[2]
    assert params["w"].sharding.spec == Spec(None, "x")
    assert params["w"].addressable_shards[0].data.shape == (8, 2)
    assert len(program._built) == 1
    plan = program.plan(params, state, BATCH)
    assert plan.out_sbp[:-1] == plan.in_sbp[:-1]
    assert not plan.notes
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-4, atol=1e-6)


def test_a_weakly_typed_state_does_not_compile_twice() -> None:
    program = sbp.compile(lambda n, x: (n + 1, x.sum()), LINE)
    n: Any = 0
    for _ in range(3):
        n, _ = program(n, X)
    assert (int(n), n.weak_type, len(program._built)) == (3, True, 1)


def test_out_sbp_says_otherwise() -> None:
    program = sbp.compile(train_step, LINE, **STATE, out_sbp=({"w": [S(0)], "b": None}, AUTO, AUTO))
    plan = program.plan(*fresh(), BATCH)
    out = dict(zip(plan.out_paths, plan.out_sbp, strict=True))
    ins = dict(zip(plan.in_paths, plan.in_sbp, strict=True))
    assert out["result[0]['w']"] == (S(0),)
    assert out["result[0]['b']"] == ins["params['b']"]


def test_an_argument_that_lies_otherwise_is_moved_warned_about_once_and_listed() -> None:
    program = sbp.compile(lambda a, b: a @ b, LINE, in_sbp=([S(0)], [B]))
    other = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(LINE.mesh, Spec(None, "x")))
    right = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(LINE.mesh, Spec("x")))
    with pytest.warns(UserWarning, match=r"sbp: a arrived as .* and is moved to .* on every call") as caught:
        program(other, np.ones((8, 8), np.float32))
        program(other, np.ones((8, 8), np.float32))
    assert [w.filename for w in caught] == [__file__]
    (note,) = program.plan(other, np.ones((8, 8), np.float32)).notes
    assert note.startswith("a arrived as") and note.endswith(": moved")
    assert program(right, np.ones((8, 8), np.float32)).sharding.spec == Spec("x")


def test_donated_memory_is_freed_wherever_the_argument_lay() -> None:
    signatures = ({"w": [S(0)]}, None)
    program = sbp.compile(lambda p, b: {"w": p["w"] + b}, LINE, in_sbp=signatures, donate_argnums=0)
    placed = jax.device_put(X, NamedSharding(LINE.mesh, Spec("x")))
    for w in (placed, jnp.asarray(X) * 1, jax.device_put(X, jax.devices("cpu")[3])):
        out = program({"w": w}, 1.0)
        assert w.is_deleted()
        np.testing.assert_allclose(out["w"], X + 1)
        with pytest.raises(DonationError, match=r"p\['w'\]"):
            program({"w": w}, 1.0)
    # A host array is the user's own.
    host = X.copy()
    program({"w": host}, 1.0)
    np.testing.assert_array_equal(host, X)


def test_donated_state_takes_no_second_place() -> None:
    program = sbp.compile(lambda p: jnp.sin(p) + 1, LINE, in_sbp=([S(0)],), donate_argnums=-1)
    x = program(X)
    before = x.addressable_shards[0].data.unsafe_buffer_pointer()
    x = program(x)
    gc.collect()
    assert x.addressable_shards[0].data.unsafe_buffer_pointer() == before
    assert "donor" in str(program.lower(X).as_text()) or "alias" in str(program.lower(X).as_text())


def test_a_donated_argument_may_be_a_result() -> None:
    program = sbp.compile(lambda a: (a, a), LINE, in_sbp=([S(0)],), donate_argnums=0)
    first, second = program(jnp.asarray(X) * 1)
    np.testing.assert_array_equal(first, X)
    np.testing.assert_array_equal(second, X)


def test_results_lie_where_the_plan_says() -> None:
    program = sbp.compile(lambda a: (a * 2, a.T), GRID, out_sbp=([S(0), S(1)], Spec(("data", "model"))))
    one, two = program(X)
    assert one.sharding == NamedSharding(GRID.mesh, Spec("data", "model"))
    assert two.sharding == NamedSharding(GRID.mesh, Spec(("data", "model")))
    assert one.addressable_shards[0].data.shape == (4, 4)


BIG = jax.ShapeDtypeStruct((1024, 1024), np.float32)


@pytest.mark.parametrize(
    ("where", "outer"),
    [(sbp.placement("h100", shape=(16, 8)), [B]), (sbp.placement("cpu", shape=(64,)), [])],
    ids=str,
)
def test_planning_and_lowering_need_no_devices(where: sbp.Placement, outer: list[Any]) -> None:
    signatures = ([*outer, S(1)], [*outer, S(0)])
    program = sbp.compile(lambda a, b: a @ b, where, in_sbp=signatures, out_sbp=[*outer, B])
    plan = program.plan(BIG, BIG)
    group = where.shape[-1]
    (only,) = plan.collectives
    assert (only.kind, only.axes, only.group_size) == ("all_reduce", (where.axes[-1],), group)
    assert plan.wire_bytes == 2 * (group - 1) / group * 1024 * 1024 * 4
    text = program.lower(BIG, BIG).as_text()
    assert "all_reduce" in text and f"num_partitions = {where.size}" in text
    with pytest.raises(SbpError, match="rank"):
        program(np.ones(BIG.shape), np.ones(BIG.shape))


def test_lowering_with_devices_compiles() -> None:
    signatures = ([B, S(1)], [B, S(0)])
    program = sbp.compile(lambda a, b: (a @ b, 2.0), GRID, in_sbp=signatures, out_sbp=([B, B], None))
    lowered = program.lower(jax.ShapeDtypeStruct((8, 8), np.float32), np.ones((8, 8)))
    assert "all-reduce" in lowered.compile().as_text()


def test_a_plan_is_taken_over(tmp_path: Any) -> None:
    params, state = fresh()
    made = sbp.compile(train_step, LINE, **STATE).plan(params, state, BATCH)
    made.save(str(tmp_path / "plan.json"))
    options = sbp.Options(plan=sbp.load_plan(tmp_path / "plan.json"), check=True)
    again = sbp.compile(train_step, LINE, options=options)
    found = again.plan(params, state, BATCH)
    assert (found.in_sbp, found.out_sbp) == (made.in_sbp, made.out_sbp)
    pinned = sbp.compile(train_step, LINE, in_sbp=({"w": [S(0)], "b": None}, None, None), options=options)
    plan = pinned.plan(params, state, BATCH)
    assert dict(zip(plan.in_paths, plan.in_sbp, strict=True))["params['w']"] == (S(0),)


def test_the_memory_limit_names_what_is_largest() -> None:
    params, state = fresh()
    needed = sbp.compile(train_step, LINE, **STATE).plan(params, state, BATCH).memory_bytes
    limits = (needed, needed // 4)
    enough, short = (
        sbp.compile(train_step, LINE, **STATE, options=sbp.Options(memory_limit=n)) for n in limits
    )
    assert enough.plan(params, state, BATCH).memory_bytes == needed
    with pytest.raises(SbpError) as caught:
        short.plan(params, state, BATCH)
    assert caught.value.problems[0].kind == "memory"


def test_the_host_is_called_once() -> None:
    seen: list[float] = []

    def f(x: Any) -> Any:
        jax.debug.callback(lambda s: seen.append(float(s)), x.sum())
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    out = sbp.compile(f, GRID, **ROWS)(X)
    jax.effects_barrier()
    np.testing.assert_allclose(out, np.sin(X) * 2, rtol=1e-6)
    np.testing.assert_allclose(seen, [X.sum()], rtol=1e-4)


def test_prints_are_not_lost(capfd: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        jax.debug.print("sum {}", x.size)
        lax.fori_loop(0, 2, lambda i, c: (jax.debug.print("again"), c)[1], 0.0)
        return x * 2

    program = sbp.compile(f, GRID, **ROWS)
    program(X)
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.count("sum 128") == 1
    assert out.count("again") == 2
