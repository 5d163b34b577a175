"""`annotate` and `on` under JAX's transformations: the identity in value, never lost in the program."""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sbp.annotation import SCOPE, Pin, annotate, annotate_p, cotangent_p, on
from sbp.compat import core
from sbp.errors import PlacementError, SignatureError
from sbp.placement import placement
from sbp.signature import B, P, S, Signature

X = jnp.arange(12.0).reshape(3, 4)
DEVICES = placement("cpu", shape=(2, 4))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of nested jaxprs included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(inner)


def pins(fn: Any, *args: Any) -> list[tuple[tuple[int, ...], Pin]]:
    """(shape, pin) of every annotation in the traced program."""
    found = equations(jax.make_jaxpr(fn)(*args))
    return [(e.outvars[0].aval.shape, e.params["pin"]) for e in found if e.primitive is annotate_p]


def plain(x: Any) -> Any:
    return jnp.sum(jnp.sin(x) * x)


def pinned(x: Any) -> Any:
    x = annotate(x, [S(0), B], grad=[P, S(1)])
    return jnp.sum(annotate(jnp.sin(x), [B, S(-1)]) * x)


TRANSFORMS: dict[str, Any] = {
    "call": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(f)(X),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(X),
    "value_and_grad": lambda f: jax.value_and_grad(f)(X),
    "vmap": lambda f: jax.vmap(f, in_axes=2)(jnp.stack([X, 2 * X], 2)),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum())(jnp.stack([X, 2 * X])),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(jnp.stack([X, 2 * X])),
    "jvp": lambda f: jax.jvp(f, (X,), (X + 1,)),
    "linearize": lambda f: jax.linearize(f, X)[1](X + 1),
    "hessian": lambda f: jax.hessian(f)(X),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(X),
    "scan": lambda f: jax.lax.scan(lambda c, x: (c + f(x), f(x)), 0.0, jnp.stack([X, 2 * X])),
    "grad of scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (c * f(x), None), 1.0, None, length=3)[0]
    )(0.1 * X),
}


@pytest.mark.some(5)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_values_are_those_of_the_program_without(name: str) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6),
        TRANSFORMS[name](pinned),
        TRANSFORMS[name](plain),
    )


def test_the_pin_is_in_the_program() -> None:
    assert pins(pinned, X) == [
        ((3, 4), Pin((S(0), B), None, (P, S(1)))),
        ((3, 4), Pin((B, S(1)), None, None)),
    ]


def test_grad_pins_the_cotangent() -> None:
    found = [pin for _, pin in pins(jax.grad(pinned), X)]
    backward = Pin((P, S(1)), None, None)
    assert found.count(backward) == 1
    assert found.count(Pin((S(0), B), None, (P, S(1)))) == 1, "the forward pin stays"
    eqn = list(equations(jax.make_jaxpr(jax.grad(pinned))(X)))
    assert not any(e.primitive is cotangent_p for e in eqn), "nothing but pins is left after transposing"


def test_the_pinned_cotangent_is_the_right_value() -> None:
    """y = 2 x, pinned in the middle: the annotated cotangent is that of y, not of x."""

    def loss(x: Any) -> Any:
        return jnp.sum(annotate(2 * x, [B], grad=[S(0)]) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(loss))(X).jaxpr
    (at,) = [
        i for i, e in enumerate(jaxpr.eqns) if e.primitive is annotate_p and e.params["pin"].nd == (S(0),)
    ]
    cut = jaxpr.replace(eqns=jaxpr.eqns[: at + 1], outvars=jaxpr.eqns[at].outvars)
    (value,) = jax.core.eval_jaxpr(cut, (), X)
    np.testing.assert_allclose(value, 2 * (2 * X))


def test_without_grad_the_cotangent_is_free() -> None:
    found = pins(jax.grad(lambda x: annotate(x, [S(0)]).sum() ** 2), X)
    assert [pin.nd for _, pin in found] == [(S(0),)]


def test_the_placement_is_kept_in_both_directions() -> None:
    found = pins(jax.grad(lambda x: (annotate(x, [S(0), B], placement=DEVICES, grad=[B, B]) ** 2).sum()), X)
    assert [pin for _, pin in found] == [
        Pin((S(0), B), DEVICES, (B, B)),
        Pin((B, B), DEVICES, None),
    ]


@pytest.mark.parametrize("at", [0, 1, 2, -1])
def test_vmap_shifts_the_dims(at: int) -> None:
    """The pin names the same data after vmap has put its dim in."""
    names = list("ab")
    for nd in itertools.product((S(0), S(1), B, P, P("max")), repeat=2):
        before: list[Signature] = list(nd)
        batched = jnp.zeros(np.insert(X.shape, at if at >= 0 else 2, 5))

        def fn(x: Any, nd: Any = before) -> Any:
            return annotate(x, nd, grad=nd[::-1])

        ((_, pin),) = pins(jax.vmap(fn, in_axes=at), batched)
        position = at % 3
        shifted = names[:position] + ["new"] + names[position:]
        for sides in (zip(before, pin.nd or (), strict=True), zip(before[::-1], pin.grad or (), strict=True)):
            for old, new in sides:
                if isinstance(old, S):
                    assert isinstance(new, S) and shifted[new.dim] == names[old.dim]
                else:
                    assert new == old


def test_vmap_of_vmap_and_of_grad() -> None:
    stacked = jnp.zeros((5, 6, *X.shape))
    ((shape, pin),) = pins(jax.vmap(jax.vmap(lambda x: annotate(x, [S(0), S(1)]))), stacked)
    assert (shape, pin.nd) == ((5, 6, 3, 4), (S(2), S(3)))
    grads = pins(jax.vmap(jax.grad(lambda x: (annotate(x, [S(0)], grad=[S(1)]) ** 2).sum())), stacked[0])
    assert [pin.nd for _, pin in grads] == [(S(1),), (S(2),)]


def test_scan_keeps_the_pins_of_its_body() -> None:
    def loop(x: Any) -> Any:
        return jax.lax.scan(
            lambda c, _: (annotate(jnp.sin(c), [S(0)], grad=[S(1)]), None), x, None, length=3
        )[0]

    assert [pin.nd for _, pin in pins(loop, X)] == [(S(0),)]
    backward = [pin.nd for _, pin in pins(jax.grad(lambda x: loop(x).sum()), X)]
    assert sorted(map(repr, backward)) == ["(S(0),)", "(S(1),)"]


def test_second_derivatives_keep_both_pins() -> None:
    found = [pin.nd for _, pin in pins(jax.jacfwd(jax.grad(pinned)), X)]
    assert (S(0), B) in found
    assert any(nd and nd[0] == P for nd in found)


def test_other_dtypes() -> None:
    assert annotate(np.arange(4), [S(0)]).dtype == jnp.int32
    assert annotate(3.0, B).shape == ()
    key = jax.random.key(0)
    assert jax.random.key_data(annotate(key, B)).tolist() == jax.random.key_data(key).tolist()
    value, tangent = jax.jvp(
        lambda i, x: annotate(i, [B]) * x, (2, 3.0), (np.zeros((), jax.dtypes.float0), 1.0)
    )
    assert (value, tangent) == (6.0, 2.0)


def test_a_bare_signature_is_a_list_of_one() -> None:
    for bare in (S(1), B, P, P("max")):
        ((_, pin),) = pins(lambda x, s=bare: annotate(x, s), X)
        assert pin.nd == (bare,)


@pytest.mark.parametrize("bad", [[], "B", [S(0), None], None, 0, [S(2)], [S(-3)], [B, S(5)], [[S(0)]]])
def test_what_is_no_signature_of_the_tensor_is_refused(bad: Any) -> None:
    with pytest.raises(SignatureError):
        annotate(X, bad)
    if bad is not None:
        with pytest.raises(SignatureError, match="grad="):
            annotate(X, B, grad=bad)


def scopes(fn: Any, *args: Any) -> dict[str, list[str]]:
    """Primitive -> the scopes that its equations carry."""
    out: dict[str, list[str]] = {}
    for eqn in equations(jax.make_jaxpr(fn)(*args)):
        out.setdefault(eqn.primitive.name, []).append(core.scope_of(eqn.source_info))
    return out


def test_the_scope_of_on_survives_grad() -> None:
    first, second = DEVICES.split("data")

    def loss(x: Any) -> Any:
        with on(first):
            x = jnp.sin(x)
        with on(second):
            x = jnp.exp(x)
        return jnp.sum(x)

    found = scopes(jax.grad(loss), X)
    marks = [f"{SCOPE}cpu[{r}]4" for r in ("0,1,2,3", "4,5,6,7")]
    for name, mark, other in (("sin", *marks), ("cos", *marks), ("exp", *marks[::-1])):
        assert all(mark in s and other not in s for s in found[name]), name
    # d exp = ct * exp(x) belongs to the second, d sin = ct * cos(x) to the first.
    products = [s for s in found["mul"] if "transpose" in s]
    assert len(products) == 2
    assert [marks[1] in products[0], marks[0] in products[1]] == [True, True]


def test_the_scope_reaches_the_backward_of_vmap_and_remat() -> None:
    (first, _) = DEVICES.split("data")
    mark = f"{SCOPE}cpu[0,1,2,3]4"

    def layer(x: Any) -> Any:
        with on(first):
            return jnp.sin(x)

    for fn in (jax.vmap(layer), jax.checkpoint(layer), jax.jit(layer)):
        found = scopes(jax.grad(lambda x, fn=fn: fn(x).sum()), X)
        assert any(mark in s for s in found["cos"])


def test_scopes_nest_and_close() -> None:
    first, second = DEVICES.split("data")

    def fn(x: Any) -> Any:
        with on(first), on(second):
            x = jnp.sin(x)
        return jnp.cos(x)

    found = scopes(fn, X)
    (inner,), (outside,) = found["sin"], found["cos"]
    assert inner.index("[0,1,2,3]") < inner.index("[4,5,6,7]")
    assert SCOPE not in outside


@pytest.mark.parametrize("wrong", [[DEVICES], "stage0", None])
def test_on_wants_a_placement(wrong: Any) -> None:
    with pytest.raises(PlacementError, match=r"an sbp.placement, or a jax.sharding.Mesh"), on(wrong):
        pass
