"""No exception but ours leaves a pass: faults thrown into every one of them."""

import operator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import InternalError, RuleError
from sbp.passes import chain
from sbp.passes.pass_manager import Chain
from sbp.rules.registry import REGISTRY

WHOLE = sbp.placement("cpu", shape=(2, 2), axes=("stage", "data"))
FIRST, LAST = WHOLE.split("stage")
X = np.ones((8, 4), np.float32)
FAULT = operator.itemgetter("missing")
"""Raises without a frame of its own, as NumPy does."""


def plain(x: Any) -> Any:
    return jnp.tanh(x @ x.T)


def staged(x: Any) -> Any:
    with sbp.on(FIRST):
        y = jnp.tanh(x)
    with sbp.on(LAST):
        return y * 2


CHAINS = {"PLACEMENT": plain, "STAGES": staged}


@pytest.mark.parametrize(
    ("name", "at"), [(n, p.name) for n in CHAINS for p in getattr(chain, n).passes], ids=str
)
def test_a_fault_in_a_pass_is_an_error_of_ours(name: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = getattr(chain, name).passes
    broken = tuple(replace(p, run=FAULT) if p.name == at else p for p in passes)
    monkeypatch.setattr(chain, name, Chain(broken))
    program = sbp.compile(CHAINS[name], WHOLE, options=sbp.Options(cache=False))
    with pytest.raises(InternalError) as refused:
        program.plan(X)
    text = str(refused.value)
    assert text.startswith(f"pass {at!r}")
    assert "this is a fault of sbp, not of your program" in text
    assert f"jax {jax.__version__}" in text
    assert refused.value.__cause__ is not None


def test_the_op_and_its_line_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(REGISTRY["dot_general"], rows=partial(operator.getitem, {}))  # type: ignore[arg-type]
    monkeypatch.setitem(REGISTRY, "dot_general", broken)
    with pytest.raises(InternalError, match=r"pass 'candidates' at dot_general, test_internal_errors.py:\d+"):
        sbp.compile(plain, WHOLE, options=sbp.Options(cache=False)).plan(X)


def test_what_the_users_code_raises_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(op: Any) -> Any:
        raise LookupError("of the user")

    monkeypatch.setitem(REGISTRY, "tanh", replace(REGISTRY["tanh"], rows=rows))
    with pytest.raises(LookupError, match="of the user"):
        sbp.compile(plain, WHOLE, options=sbp.Options(cache=False)).plan(X)
    assert issubclass(InternalError, sbp.SbpError)
    assert not issubclass(RuleError, InternalError)
