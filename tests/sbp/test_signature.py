"""Signatures: printing and reading them, negative dims, and the small questions asked of them."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp.errors import SignatureError
from sbp.signature import (
    AUTO,
    PARTIAL_OPS,
    B,
    Broadcast,
    P,
    Partial,
    S,
    Split,
    format_sbp,
    has_partial,
    is_signature,
    normalise,
    parse_sbp,
    splits_of,
)

ONE = st.one_of(
    st.integers(-12, 12).map(Split), st.sampled_from([B, S(AUTO)]), st.sampled_from(PARTIAL_OPS).map(Partial)
)
MANY = st.lists(ONE, min_size=1, max_size=5).map(tuple)


@given(MANY)
def test_what_is_printed_is_read_back(nd: tuple[object, ...]) -> None:
    text = format_sbp(nd)  # type: ignore[arg-type]
    assert parse_sbp(text) == nd
    assert parse_sbp(f"  {text[1:-1]} ") == nd, "the brackets are optional"


@given(st.lists(st.one_of(st.integers(0, 12).map(Split), st.just(B), st.just(P)), min_size=1, max_size=5))
def test_the_short_form_is_read(nd: list[object]) -> None:
    short = ",".join(f"S{s.dim}" if isinstance(s, Split) else repr(s) for s in nd)
    assert parse_sbp(short) == tuple(nd)


@pytest.mark.parametrize("text", ["P(max)", 'P("max")', "P('max')", "[ P( max ) ]"])
def test_quotes_and_spaces_do_not_matter(text: str) -> None:
    assert parse_sbp(text) == (P("max"),)


def test_printed_forms() -> None:
    assert format_sbp((S(0), B, P, P("max"), P("min"), S(-1))) == "[S(0), B, P, P(max), P(min), S(-1)]"
    assert repr(AUTO) == "AUTO"


def test_a_split_of_any_dim_is_one_object() -> None:
    assert S(AUTO) is S(AUTO) != S(0) and is_signature(S(AUTO)) and not isinstance(S(AUTO), Split)
    for made in (pickle.loads(pickle.dumps((S(AUTO), S(3), AUTO))), copy.deepcopy((S(AUTO), S(3), AUTO))):
        assert made == (S(AUTO), S(3), AUTO) and made[2] is AUTO


@pytest.mark.parametrize(
    "text", ["S", "S()", "S(0", "S(x)", "Q", "S(0) B", "B,,B", "[S(0)], B", "BB", "S(1.5)"]
)
def test_what_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(SignatureError):
        parse_sbp(text)


def test_p_makes_the_other_partials() -> None:
    assert P == P("sum") == Partial("sum") == Partial()
    assert P("max") == Partial("max") != P("min")
    assert len({P, P("sum"), P("max"), P("min")}) == 3
    assert Broadcast() == B and S is Split


def test_is_signature() -> None:
    assert all(map(is_signature, (S(0), B, P, P("min"))))
    assert not any(map(is_signature, (AUTO, None, "B", 0, (B,), S)))


@given(MANY, st.integers(1, 12))
def test_normalise_is_numpys_rule_for_negative_dims(nd: tuple[object, ...], ndim: int) -> None:
    out = normalise(nd, ndim)  # type: ignore[arg-type]
    dims = range(ndim)
    for before, after in zip(nd, out, strict=True):
        if isinstance(before, Split) and -ndim <= before.dim < ndim:
            assert after == Split(dims[before.dim])
        else:
            assert after == before, "what no dim answers to is left for the caller to refuse"
    assert normalise(out, ndim) == out


@given(MANY)
def test_questions_against_plain_loops(nd: tuple[object, ...]) -> None:
    for dim in range(-12, 13):
        expected = [axis for axis in range(len(nd)) if nd[axis] == Split(dim)]
        assert list(splits_of(nd, dim)) == expected  # type: ignore[arg-type]
    assert has_partial(nd) == ("P" in format_sbp(nd))  # type: ignore[arg-type]
