"""What rules say of their ops in a word is true of every sample: identity, pointwise, layout."""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from sbp.compat import core
from sbp.rules import REGISTRY, Rule, lookup
from tests.rules.claims import Application, Array, Sample, applications, same, sample, whole
from tests.rules.special import from_numpy, to_numpy
from tests.rules.test_claims import ALL_SAMPLES

# How many elements are changed, one at a time; samples have few.
CHANGES = 4


def flagged(flag: str) -> list[Sample]:
    """The samples of the ops whose rules say so."""
    said = [(one, lookup(one.name)) for one in ALL_SAMPLES]
    return [one for one, rule in said if rule is not None and getattr(rule, flag)]


def bits(x: Any) -> Array:
    """An array as the bytes of its elements."""
    array = np.ascontiguousarray(to_numpy(x))
    return array.reshape(-1).view(np.uint8).reshape(*array.shape, array.dtype.itemsize)


def run(app: Application, values: Sequence[Array]) -> list[Array]:
    """What one device makes of the operands."""
    args = [from_numpy(v, x) for v, x in zip(values, app.operands, strict=True)]
    return [to_numpy(y) for y in core.bind(app.node.primitive, args, dict(app.node.params))]


def not_identical(app: Application, _: float) -> Iterator[str]:
    values, results = app.special
    for x, y in ((app.operands[0], app.results[0]), (values[0], results[0])):
        if bits(x).shape != bits(y).shape or (bits(x) != bits(y)).any():
            yield f"{app.node.op}: {y} of {x}"


def not_pointwise(app: Application, close: float) -> Iterator[str]:
    """Places of results that change where an element of another place has changed.

    Where rounding may differ, in iterations until all elements have converged, they stay as close as it does.
    """
    values = [to_numpy(x) for x in app.operands]
    before, shape = run(app, values), tuple(app.results[0].shape)
    if any(tuple(y.shape) != shape for y in app.results):
        yield f"{app.node.op}: results of several shapes"
        return
    for i, x in enumerate(values):
        own = tuple(app.operands[i].shape)
        if own and (len(own) != len(shape) or any(n not in (1, m) for n, m in zip(own, shape, strict=True))):
            yield f"{app.node.op}: operand {i} of shape {x.shape} for results of shape {shape}"
        elif own:
            yield from _elsewhere(app, values, i, before, close)


def _elsewhere(
    app: Application, values: list[Array], i: int, before: Sequence[Array], close: float
) -> Iterator[str]:
    x_shape = app.operands[i].shape
    places = list(np.ndindex(*x_shape))
    for place in places[:: max(1, len(places) // CHANGES)]:
        changed = list(values)
        changed[i] = values[i].copy()
        # Another element of the same operand is a value that the op takes.
        changed[i][place] = other(values[i], place)
        for k, (x, y) in enumerate(zip(before, run(app, changed), strict=True)):
            alike = np.isclose(x, y, close, close, equal_nan=True) if close else (bits(x) == bits(y)).all(-1)
            # A dim of size 1 stands beside all places of the results.
            alike[tuple(slice(None) if n == 1 else p for n, p in zip(x_shape, place, strict=True))] = True
            if not alike.all():
                yield f"{app.node.op}: result {k} at other places than {place} of operand {i}"


def other(x: Array, place: tuple[int, ...]) -> Any:
    """An element of an operand that differs from the one at a place, or one more than it."""
    here = x[place]
    flat = x.reshape(-1, *x.shape[len(place) :])
    differ = [y for y in flat if (y != here).any()]
    return differ[0] if differ else ~here if x.dtype == bool else here + 1


def not_layout(app: Application, _: float) -> Iterator[str]:
    """Results of as many elements that have others, up to the conversion to their type."""
    x, y = app.operands[0], app.results[0]
    if x.size != y.size:
        return
    given = to_numpy(x)
    if x.dtype != y.dtype or app.node.op == "reduce_precision":  # converted: compare what was made of each
        given = run_flat(app, given)
    if not same(np.sort(given, axis=None), np.sort(to_numpy(y), axis=None), 0.0):
        yield f"{app.node.op}: elements {to_numpy(y)} of {given}"


def run_flat(app: Application, given: Array) -> Array:
    """Every element converted by itself, as a tensor of one element."""
    assert len(app.operands) == 1 and given.shape == app.operands[0].shape
    each = [core.bind(app.node.primitive, [v[None]], dict(app.node.params))[0] for v in given.reshape(-1)]
    return np.concatenate([to_numpy(y) for y in each])


CHECKS = {"identity": not_identical, "pointwise": not_pointwise, "layout": not_layout}
EACH = [pytest.param(flag, one, id=f"{flag}: {one}") for flag in CHECKS for one in flagged(flag)]


@pytest.mark.some(30)
@pytest.mark.parametrize(("flag", "one"), EACH)
def test_it_is_true(flag: str, one: Sample) -> None:
    assert not [wrong for app in applications(one) for wrong in CHECKS[flag](app, one.close)]


LIES = {
    "identity": sample("neg", lambda x: -x, whole((5, 4))),
    "pointwise": sample("cumsum", lambda x: jnp.cumsum(x, 0), whole((5, 4))),
    "layout": sample("sin", jnp.sin, whole((5, 4))),
}


@pytest.mark.parametrize("flag", LIES)
def test_the_check_itself(flag: str) -> None:
    assert [wrong for app in applications(LIES[flag]) for wrong in CHECKS[flag](app, 0.0)]


def test_what_is_identical_is_pointwise_and_layout() -> None:
    rules: list[Rule] = [r for r in REGISTRY.values() if r.identity]
    assert rules and all(r.pointwise and r.layout for r in rules)
