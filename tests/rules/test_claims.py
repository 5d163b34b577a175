"""Every row of every rule is true, and so is what rows compose to on two axes."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest

from sbp.rules import REGISTRY, Row
from sbp.rules.entry import Rule
from sbp.rules.registry import USER
from sbp.signature import B, P, Partial, S
from tests.golden.algebra.applications import NEWER
from tests.rules import (
    samples_attention,
    samples_contract,
    samples_elementwise,
    samples_index,
    samples_linalg,
    samples_lookup,
    samples_parameters,
    samples_random,
    samples_reduce,
    samples_shape,
    samples_update,
    samples_windows,
)
from tests.rules.claims import (
    WITHOUT_SAMPLE,
    Sample,
    applications,
    false_compositions,
    false_rows,
    sample,
    whole,
)

FAMILIES = (
    samples_contract,
    samples_elementwise,
    samples_index,
    samples_linalg,
    samples_parameters,
    samples_random,
    samples_reduce,
    samples_shape,
    samples_update,
    samples_windows,
)
SAMPLES = [one for family in FAMILIES for one in family.SAMPLES]
# Those of attention and of lookups run in files of their own, test_attention.py and test_lookup.py.
ALL_SAMPLES = [*SAMPLES, *samples_attention.SAMPLES, *samples_lookup.SAMPLES]


def first_ones(samples: list[Sample]) -> list[Any]:
    """The first sample of every rule in the default suite, the others in the full one."""
    first = {one.name: one for one in reversed(samples)}
    return [one if first[one.name] is one else pytest.param(one, marks=pytest.mark.full) for one in samples]


@pytest.mark.parametrize("one", first_ones(SAMPLES), ids=str)
def test_rows_are_true(one: Sample) -> None:
    assert applications(one), f"the sample does not produce {one.name}"
    assert not false_rows(one, one.groups[-1:])


@pytest.mark.some(40)
@pytest.mark.parametrize("one", [one for one in SAMPLES if one.pairs], ids=str)
def test_compositions_are_true(one: Sample) -> None:
    assert not false_compositions(one, (2, 3))


@pytest.mark.slow
@pytest.mark.parametrize("one", [one for one in SAMPLES if one.pairs > 1], ids=str)
def test_on_axes_of_other_sizes(one: Sample) -> None:
    assert not false_rows(one, one.groups[:-1])
    assert not false_compositions(one, (2, 2))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("one", samples_random.WIDE, ids=str)
def test_rows_are_true_of_wide_types(one: Sample) -> None:
    assert applications(one)
    assert not false_rows(one, one.groups)


def test_every_rule_has_a_sample() -> None:
    """But those with a reason, which have none."""
    ours = {name for name, rule in REGISTRY.items() if rule.family != USER}
    lacking = set() if jax.__version_info__ >= (0, 12) else NEWER
    assert ours - lacking - {one.name for one in ALL_SAMPLES} == set(WITHOUT_SAMPLE)


@pytest.fixture
def lies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules that are wrong, each in its own way."""
    wrong = {
        "sin": [Row((P,), (P,))],
        "exp": [Row((Partial("max"),), (Partial("min"),))],
        "cumsum": [Row((S(0),), (S(0),))],
        "reduce_sum": [Row((S(0),), (B,))],
        "tanh": [Row((S(0),), (S(1),))],
    }
    for name, rows in wrong.items():
        monkeypatch.setitem(REGISTRY, name, Rule(name, lambda op, rows=rows: rows))
    yield


@pytest.mark.usefixtures("lies")
@pytest.mark.parametrize("name", ["sin", "exp", "cumsum", "reduce_sum", "tanh"])
def test_the_check_itself(name: str) -> None:
    import jax.numpy as jnp

    call = {"reduce_sum": lambda x: jnp.sum(x, 0)}.get(name, getattr(jnp, name, None))
    lie = sample(name, call if name != "cumsum" else lambda x: jnp.cumsum(x, 0), whole((5, 4)), groups=(2,))
    assert len(false_rows(lie, (2,))) == 1
