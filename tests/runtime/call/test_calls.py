"""How a program is called and remembered: keywords as in jit, what it is built anew for, and threads."""

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp import AUTO, B, S
from sbp.errors import ArgumentError, DonationError, SignatureError
from sbp.rules import REGISTRY
from sbp.runtime.call.binding import Parameters, parameters
from sbp.runtime.execute.build_cache import BuildCache

LINE = sbp.placement("cpu", shape=(8,))
X = np.arange(128, dtype=np.float32).reshape(16, 8)
ROWS, COLUMNS, WHOLE = [S(0)], [S(1)], [B]


def powers(x: Any, n: Any = 2, *, scale: Any = 1.0, flip: Any = False) -> Any:
    """`n` and `flip` must be Python values."""
    y = x**n if n > 1 else x
    return (-y if flip else y) * scale


# name -> (what is static, args, kwargs)
CALLS: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = {
    "by position": ({"static_argnums": 1}, (X, 3), {}),
    "by keyword": ({"static_argnums": 1}, (X,), {"n": 3}),
    "all by keyword": ({"static_argnums": 1}, (), {"n": 3, "x": X}),
    "left out": ({"static_argnums": 1}, (X,), {}),
    "by name": ({"static_argnames": "n"}, (X, 3), {}),
    "by name, by keyword": ({"static_argnames": ("n",)}, (X,), {"n": 3}),
    "no position": ({"static_argnames": ["n", "flip"]}, (X, 3), {"flip": True}),
    "both": ({"static_argnums": 1, "static_argnames": "flip"}, (X,), {"n": 3, "flip": True, "scale": 2.0}),
    "counted from the end": ({"static_argnums": -1}, (X,), {"n": 3}),
}


@pytest.mark.parametrize("name", CALLS)
def test_static_arguments(name: str) -> None:
    static, args, kwargs = CALLS[name]
    # jit tells the names of positions only where no names are given, so all are given to it.
    expected = jax.jit(powers, static_argnames=("n", "flip"))(*args, **kwargs)
    np.testing.assert_allclose(sbp.compile(powers, LINE, **static)(*args, **kwargs), expected)


def test_static_keywords_are_part_of_the_key() -> None:
    program = sbp.compile(powers, LINE, static_argnames=("n", "flip"))
    for n, flip in ((1, True), (2, True), (2, False), (2.0, False)):
        np.testing.assert_allclose(program(X, n=n, flip=flip), powers(X, n, flip=flip))
    assert len(program._built) == 4
    program(X, 2, flip=True), program(x=X, n=2, flip=True)
    assert len(program._built) == 4


def test_what_is_given_by_keyword_has_its_entry() -> None:
    def product(x: Any, w: Any, b: Any = 0.0) -> Any:
        return x @ w + b

    program = sbp.compile(product, LINE, in_sbp=(ROWS, COLUMNS, AUTO))
    y = X.T.copy()
    calls: list[Any] = [((X, y), {}), ((X,), {"w": y}), ((), {"w": y, "x": X})]
    for args, kwargs in calls:
        assert program.plan(*args, **kwargs).in_sbp == ((S(0),), (S(1),))
        np.testing.assert_allclose(program(*args, **kwargs), X @ y)
    assert len(program._built) == 1
    # What is left out keeps those behind it by keyword.
    program = sbp.compile(lambda x, y=1.0, z=2.0: x * y * z, LINE, in_sbp=(ROWS, AUTO, COLUMNS))
    assert program.plan(X, z=X).in_sbp == ((S(0),), (S(1),))
    np.testing.assert_allclose(program(X, z=X), X * X)


def test_signatures_by_name() -> None:
    def scaled(x: Any, *rest: Any, by: Any, **more: Any) -> Any:
        return x * by + sum(rest) + sum(more.values())

    names = {"x": ROWS, "by": COLUMNS, "extra": WHOLE, "rest[1]": ROWS}
    program = sbp.compile(scaled, LINE, in_sbp=names)
    plan = program.plan(X, X, X, by=X, extra=X)
    signed = dict(zip(plan.in_paths, plan.in_sbp, strict=True))
    assert [signed[k] for k in ("x", "by", "extra")] == [(S(0),), (S(1),), (B,)]
    assert plan.in_sbp[2] == (S(0),)
    np.testing.assert_allclose(program(X, X, X, by=X, extra=X), X * X + 3 * X)


def test_containers_by_name() -> None:
    def total(p: Any, *, q: Any) -> Any:
        return p["w"] + q["v"]

    args: Any = ({"w": X},)
    plan = sbp.compile(total, LINE, in_sbp={"q": {"v": ROWS}}).plan(*args, q={"v": X})
    assert plan.in_sbp[1] == (S(0),)
    with pytest.raises(SignatureError, match=r"in_sbp\['q'\]"):
        sbp.compile(total, LINE, in_sbp={"q": {"w": ROWS}}).plan(*args, q={"v": X})


def test_one_signature_for_all_positional_arguments() -> None:
    program = sbp.compile(lambda x, w=1.0, *, k=1.0: x * w * k, LINE, in_sbp=ROWS)
    assert program.plan(X, w=X).in_sbp == program.plan(X, X).in_sbp == ((S(0),), (S(0),))
    assert program.plan(w=X, x=X, k=X).in_sbp[:2] == ((S(0),), (S(0),))


@pytest.mark.parametrize(
    "donate",
    [{"donate_argnums": 0}, {"donate_argnames": "p"}, {"donate_argnums": (0,), "donate_argnames": ("p",)}],
    ids=str,
)
def test_donation_by_keyword(donate: Any) -> None:
    program = sbp.compile(lambda p, x: jax.tree.map(lambda a: a + x.sum(), p), LINE, **donate)
    for call in (lambda p: program(p, X), lambda p: program(p=p, x=X), lambda p: program(x=X, p=p)):
        p = {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}
        call(p)
        assert all(a.is_deleted() for a in p.values())
        with pytest.raises(DonationError):
            call(p)


def test_donation_of_what_has_no_position() -> None:
    program = sbp.compile(lambda x, *, a, z: (x + 1, a + z), LINE, donate_argnames="z")
    x, a, z = jnp.ones(8), jnp.ones(8), jnp.ones(8)
    program(x, z=z, a=a)
    assert (x.is_deleted(), a.is_deleted(), z.is_deleted()) == (False, False, True)


def test_parameters() -> None:
    def f(a: Any, b: Any, *, c: Any) -> Any: ...
    def g(a: Any, *rest: Any) -> Any: ...

    def of(fn: Any, argnums: Any, argnames: Any = ()) -> Any:
        own, wrong = parameters(fn, (), (), argnums, argnames)
        return own.static.argnums, sorted(own.static.argnames), [p.got for p in wrong]

    assert of(f, 1) == ((1,), ["b"], [])
    assert of(f, (-1, 0)) == ((1, 0), ["a", "b"], [])
    assert of(f, (), ("c", "a")) == ((0,), ["a", "c"], [])
    assert of(f, (2, -3, 1))[2] == ["position 2", "position -3"]
    assert of(f, (), "d")[2] == ["'d'"]
    assert of(g, 9) == ((9,), [], [])
    assert of(jnp.add, (0, 3))[0] == (0, 3)
    assert Parameters.of(dict).positional is None


def test_defaults_stay_python_values() -> None:
    def f(x: Any, n: Any = 3, mode: Any = "sum") -> Any:
        return getattr(x, mode)() if n > 2 else x

    assert float(sbp.compile(f, LINE, in_sbp=(ROWS, AUTO, AUTO))(X)) == X.sum()
    assert float(sbp.compile(f, LINE, static_argnames="mode")(X, mode="max")) == X.max()


MISSING: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "one": (lambda: sbp.compile(lambda p, s, b: p, LINE, in_sbp=(AUTO, AUTO, ROWS))(X, X), ["b"]),
    "several": (lambda: sbp.compile(lambda p, s, *, b: p, LINE)("text"), ["s", "b", "p"]),
    "unknown": (lambda: sbp.compile(lambda x, scale=1: x, LINE)(X, scael=2), ["<lambda>(scael=...)"]),
    "twice": (lambda: sbp.compile(lambda x, s=1: x, LINE)(X, x=2), ["x"]),
    "too many": (lambda: sbp.compile(lambda x: x, LINE)(X, X), ["<lambda>(...)"]),
}


@pytest.mark.parametrize("name", MISSING)
def test_arguments_that_do_not_fit_are_named(name: str) -> None:
    call, where = MISSING[name]
    with pytest.raises(ArgumentError) as caught:
        call()
    assert [p.where for p in caught.value.problems] == where


def counted(fn: Any) -> tuple[Any, list[int]]:
    """A function, and how often it was traced."""
    traces: list[int] = []

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return fn(*args, **kwargs)

    return run, traces


# Settings that change what is traced, and to what.
SETTINGS: dict[str, tuple[Any, Any]] = {
    "jax_random_seed_offset": (lambda x: x + jax.random.uniform(jax.random.key(3), x.shape), 5),
    "jax_default_prng_impl": (lambda x: x + jax.random.uniform(jax.random.key(3), x.shape), "rbg"),
    "jax_threefry_partitionable": (lambda x: x + jax.random.uniform(jax.random.key(3), x.shape), False),
    "jax_default_matmul_precision": (lambda x: x @ x.T, "highest"),
    "jax_numpy_rank_promotion": (lambda x: x + x[0], "warn"),
    "jax_enable_x64": (lambda x: x * 2, True),
}


@pytest.mark.some(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_jax_is_part_of_the_key(name: str) -> None:
    fn, value = SETTINGS[name]
    fn, traces = counted(fn)
    program, before = sbp.compile(fn, LINE, in_sbp=ROWS), getattr(jax.config, name)
    program(X), program(X)
    assert len(traces) == 1
    try:
        jax.config.update(name, value)
        np.testing.assert_allclose(program(X), SETTINGS[name][0](X), rtol=1e-5)
        assert len(traces) == 2
    finally:
        jax.config.update(name, before)
    np.testing.assert_allclose(program(X), SETTINGS[name][0](X), rtol=1e-5)
    assert len(traces) == 2


def test_rules_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, traces = counted(jnp.sinh)
    program = sbp.compile(fn, LINE, in_sbp=ROWS, out_sbp=ROWS)
    program(X)
    assert not program.plan(X).collectives
    for name in ("sinh", "no_such_op"):
        monkeypatch.setitem(REGISTRY, name, replace(REGISTRY["sinh"], rows=lambda op: []))
        program(X), program(X)
        assert [c.kind for c in program.plan(X).collectives] == ["all_gather"]
    assert len(traces) == 3
    monkeypatch.undo()
    sbp.register_rule("no_such_op", "a -> a")
    program(X)
    del REGISTRY["no_such_op"]
    program.plan(X)
    assert len(traces) == 5


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """What threads that start together get."""
    gate, out = threading.Barrier(count), list[Any]([None] * count)

    def run(i: int) -> None:
        gate.wait()
        try:
            out[i] = call(i)
        except Exception as e:
            out[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads)
    return out


def test_the_first_call_of_many_threads_builds_once() -> None:
    fn, traces = counted(lambda x: jnp.tanh(x) * 2)
    one = sbp.compile(fn, sbp.placement("cpu", shape=(1,)))
    out = together(4, lambda i: np.asarray(one(X)))
    assert len(traces) == 1
    assert all(np.array_equal(a, out[0]) for a in out)
    (built,) = one._built.values()
    assert built.executable[0]._cache_size() == 1


def test_threads_of_different_signatures() -> None:
    fn, traces = counted(lambda x: x * 2)
    program = sbp.compile(fn, LINE)
    plans = together(4, lambda i: program.plan(X[: 8 * (1 + i % 2)]))
    assert len(traces) == 2
    assert plans[0] is plans[2] and plans[1] is plans[3]


def test_programs_that_plan_each_other_do_not_wait_for_ever() -> None:
    """Each one's trace asks for a build of the other: with one lock per program two threads would wait."""
    met = threading.Barrier(2)
    programs: list[Any] = []

    def asks(other: int) -> Any:
        def f(x: Any, depth: Any) -> Any:
            if depth == 2:
                met.wait(30)
                programs[other].plan(jax.ShapeDtypeStruct((8,), np.float32), 1)
            return x * depth

        return f

    programs += [sbp.compile(asks(1 - i), LINE, static_argnums=1) for i in range(2)]
    plans = together(2, lambda i: programs[i].plan(jax.ShapeDtypeStruct((8,), np.float32), 2))
    assert [type(p).__name__ for p in plans] == ["Plan", "Plan"]


def test_a_build_that_fails_is_tried_again() -> None:
    builds: BuildCache[int] = BuildCache()
    made: list[int] = []

    def make() -> int:
        made.append(1)
        if len(made) == 1:
            raise ValueError
        return 7

    with pytest.raises(ValueError):
        builds.slot("k").get(lambda built: False, make)
    assert (len(builds), builds.slot("k").get(lambda built: False, make), builds.values()) == (0, 7, [7])


def test_static_arguments_without_a_hash_are_refused_each_time() -> None:
    program = sbp.compile(lambda x, n: x, LINE, static_argnums=1)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="can be hashed"):
            program(X, [3])


def test_a_prefix_leaves_scalars_whole_and_says_so() -> None:
    state = {"count": np.int32(3), "mu": X, "nu": X, "key": jax.random.key(0)}
    program = sbp.compile(lambda s, x: ({**s, "count": s["count"] + 1}, x.sum()), LINE, in_sbp=(ROWS, ROWS))
    plan = program.plan(state, X)
    signed = dict(zip(plan.in_paths, plan.in_sbp, strict=True))
    assert [signed[f"s[{k!r}]"] for k in ("count", "mu", "key")] == [(B,), (S(0),), (B,)]
    assert "in_sbp: [S(0)] leaves scalars B: s['count'], s['key']" in plan.notes
    assert int(program(state, X)[0]["count"]) == 4
    # Given for the scalar itself it is a mistake, as it is for any tensor that lacks the dim.
    for wrong in (({"count": ROWS, "mu": AUTO, "nu": AUTO, "key": AUTO}, AUTO), (COLUMNS, [S(2)])):
        with pytest.raises(SignatureError):
            sbp.compile(lambda s, x: s, LINE, in_sbp=wrong).plan(state, X)
    with pytest.raises(SignatureError):
        sbp.compile(lambda s: s, LINE, in_sbp=(COLUMNS,)).plan({"v": X[0]})
