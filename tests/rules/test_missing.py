"""No useful row is missing: what holds and is not listed has its reason here."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import pytest
from jax import lax

from sbp.rules import REGISTRY, Op, Row
from sbp.rules.entry import Rule
from sbp.signature import Partial, Split
from tests.rules.claims import Sample, describe, sample, whole
from tests.rules.missing import report
from tests.rules.test_claims import SAMPLES


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows that hold in the samples and are not listed.

    Arguments:
      ops: their names.
      kinds: what their operands may be: "split", "sum", "max", "min", beside whole.
    """

    ops: tuple[str, ...]
    kinds: frozenset[str]
    why: str


def left_out(ops: str, kinds: str, why: str) -> LeftOut:
    """An entry of the table."""
    return LeftOut(tuple(ops.split()), frozenset(kinds.split()), why)


LEFT_OUT = [
    left_out("clamp", "max min", "extrema of the bounds: bounds are not computed by reductions"),
    left_out("div", "max min", "of unsigned integers only, which are hardly ever divided as extrema"),
    left_out("shift_right_arithmetic", "max min", "integers that are shifted are bits, not extrema"),
    left_out(
        "scatter-add scatter-sub", "max min", "wrong where infinities of both signs meet; few elements do"
    ),
    left_out("scatter-max scatter-min", "max min", "a maximum of minima: the other way round is not meant"),
    left_out("nextafter", "split sum max min", "it moves by less than the comparison of floats sees"),
    left_out("polynomial", "sum", "linear in its coefficients, which are constants"),
    left_out("regularized_incomplete_beta", "max min", "a distribution's parameters are not extrema"),
    left_out(
        "convert_element_type", "sum", "wrong where the other type's range ends, which the data do not reach"
    ),
    left_out(
        "gather",
        "split",
        "of unsigned integers the zeros for others' rows are minima too: a sum does as well",
    ),
    left_out("reduce_window_sum", "max min", "windows that meet one element each, as after a dilation only"),
    left_out(
        "reduce reduce_window sbp_update_rows", "sum max min", "what holds for one function of a user's"
    ),
    left_out("hessenberg tridiagonal", "sum max min", "a matrix of two rows is so already"),
    left_out("select_and_scatter_add select_and_gather_add", "max min", "gradients are not extrema"),
    left_out("scatter", "sum max min", "two updates of one row: which of them wins is not defined"),
    left_out(
        "conv_general_dilated", "split", "a kernel split in space is a gradient; its image is split alike"
    ),
]


def kinds(row: Row) -> set[str]:
    """What the operands of a row are, beside whole."""
    splits = {"split" for s in row.operands if isinstance(s, Split)}
    return splits | {s.op for s in row.operands if isinstance(s, Partial)}


def unexplained(name: str, samples: Sequence[Sample]) -> list[str]:
    """What is missing without a reason, and what the search is blind to."""
    reasons = [r.kinds for r in LEFT_OUT if name in r.ops]
    out = []
    for one in samples:
        missing, unseen = report(one)
        rows = [row for row in missing if not any(kinds(row) <= r for r in reasons)]
        out += [f"{one}: missing: {describe(row.operands, row.results)}" for row in rows]
        out += [f"{one}: not seen: {text}" for text in unseen]
    return out


BY_OP = {name: [s for s in SAMPLES if s.name == name] for name in dict.fromkeys(s.name for s in SAMPLES)}


# Many operands, many dims, or long to compile: of these a few samples, and none in the quick part.
COSTLY = """
concatenate conv_general_dilated dynamic_update_slice gather igamma igamma_grad_a igammac
ragged_dot_general random_gamma reduce_window regularized_incomplete_beta sbp_update_rows scatter
scatter-add scatter-max scatter-min scatter-sub tridiagonal_solve
""".split()
FEW = 2
QUICK = {name: samples[:1] for name, samples in BY_OP.items() if name not in COSTLY}
REST = {
    name: samples[:: -(-len(samples) // FEW)] if name in COSTLY else samples[1:]
    for name, samples in BY_OP.items()
    if name in COSTLY or samples[1:]
}


@pytest.mark.some(24)
@pytest.mark.parametrize("name", QUICK)
def test_no_row_is_missing(name: str) -> None:
    assert not unexplained(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", REST)
def test_no_row_is_missing_in_other_samples(name: str) -> None:
    assert not unexplained(name, REST[name])


@pytest.mark.parametrize("reason", LEFT_OUT, ids=lambda reason: reason.ops[0])
def test_reasons_are_of_ops(reason: LeftOut) -> None:
    assert set(reason.ops) <= set(REGISTRY)


CASES = [
    sample("reduce_max", lambda x: lax.reduce_max(x, (0,)), whole((6, 4))),
    sample("dot_general", lambda x, y: x @ y, whole((4, 6)), whole((6, 2), seed=1)),
    sample("gather", lambda x, i: x[i], whole((6, 4)), whole((4,), jnp.int32, 0, 6)),
    sample("select_n", lax.select_n, whole((4, 6), bool), whole((4, 6)), whole((4, 6), seed=1)),
]


@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_check_itself(one: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule without one of its rows, whichever, has a row missing."""
    full = REGISTRY[one.name]
    assert report(one) == ([], [])
    for gone in itertools.count():
        removed: list[Row] = []

        def fewer(op: Op, gone: int = gone, removed: list[Row] = removed) -> list[Row]:
            every = list(full.rows(op))
            removed += every[gone : gone + 1]
            return every[:gone] + every[gone + 1 :]

        monkeypatch.setitem(REGISTRY, one.name, Rule(one.name, fewer, full.body))
        missing = {describe(row.operands, row.results) for row in report(one)[0]}
        if not removed:
            break
        assert missing == {describe(row.operands, row.results) for row in removed}
