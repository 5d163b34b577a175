"""Digests of graphs: equal for equal programs, and for nothing else."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, S
from sbp.passes.plan.digest import ParamText, graph_digest
from sbp.passes.program.trace import trace

X = np.ones((8, 16), np.float32)
HERE = Path(__file__).resolve()


def program(x: Any, w: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ w) * 0.5)


def drawn(key: Any) -> Any:
    return jax.random.normal(key, (4,))


def looped(n: int, unit: Callable[[Any], Any] = jnp.sin) -> Callable[[Any], Any]:
    return lambda x: lax.fori_loop(0, n, lambda i, c: unit(c), x)


def digest(fn: Callable[..., Any], *args: Any) -> str:
    found = graph_digest(trace(fn, args, {}).graph)
    assert found.exact
    return found.text


def test_equal_programs_have_one() -> None:
    assert digest(program, X, X.T) == digest(lambda a, b: jnp.sum(jnp.tanh(a @ b) * 0.25), X, X.T)
    assert digest(looped(3), X) == digest(looped(3), X)
    key = jax.random.key(0)
    assert digest(lambda k: jax.random.normal(k, (4,)), key) == digest(
        lambda k: jax.random.normal(k, (4,)), key
    )


OTHERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "as it is": (program, (X, X.T)),
    "another op": (lambda x, w: jnp.sum(jnp.sin(x @ w) * 0.5), (X, X.T)),
    "another shape": (program, (X[:4], X.T)),
    "another dtype": (program, (X.astype(jnp.bfloat16), X.T.astype(jnp.bfloat16))),
    "other connections": (lambda x, w: jnp.sum(jnp.tanh(x @ x.T) * 0.5), (X, X.T)),
    "a factor of zero": (lambda x, w: jnp.sum(jnp.tanh(x @ w) * 0.0), (X, X.T)),
    "another parameter": (lambda x, w: jnp.sum(jnp.tanh(x @ w) * 0.5, axis=0), (X, X.T)),
    "an annotation": (lambda x, w: program(sbp.annotate(x, [S(0)]), w), (X, X.T)),
    "another annotation": (lambda x, w: program(sbp.annotate(x, [B]), w), (X, X.T)),
    "a loop": (looped(3), (X,)),
    "a longer loop": (looped(4), (X,)),
    "another body": (looped(3, jnp.cos), (X,)),
}


def test_what_signatures_depend_on_changes_it() -> None:
    found = {name: digest(fn, *args) for name, (fn, args) in OTHERS.items()}
    assert len(set(found.values())) == len(found)


def test_it_is_the_same_in_another_process() -> None:
    """Whatever the order of hashes and the addresses of objects."""
    code = (
        "from tests.passes.plan.test_digest import *; "
        "print([digest(fn, *args) for fn, args in OTHERS.values()])"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=HERE.parents[3], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([digest(fn, *args) for fn, args in OTHERS.values()])


def test_a_function_is_not_all_that_it_computes() -> None:
    """Its name says which program it is; what it computes can change, so nothing is kept under that."""

    def f(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert not graph_digest(trace(f, [X], {}).graph).exact


@pytest.mark.parametrize("x", [lambda: 0, object(), [print], {"f": np.sin}])
def test_what_cannot_be_written_down_is_known_as_such(x: Any) -> None:
    text = ParamText()
    assert "0x" not in text.of(x) and not text.exact


def test_parameters_are_told_apart() -> None:
    values: list[Any] = [
        *(1, 1.0, True, "1", None, (1,), [1], {1: 2}, {2: 1}, frozenset({1}), np.float32(1), np.float64(1)),
        *(np.arange(2), np.arange(3), np.arange(3.0), np.dtype("float32"), np.dtype("int8"), jnp.bfloat16),
        *(0.0, -0.0, float("nan"), 1j, lax.Precision.HIGHEST, lax.Precision.DEFAULT, np.zeros((2, 1))),
        *(np.zeros((1, 2)), np.zeros(5000), np.eye(1, 5000, 2500)[0]),
    ]
    text = ParamText()
    assert len({text.of(v) for v in values}) == len(values) and text.exact
    assert text.of({"a": 1, "b": 2}) == text.of({"b": 2, "a": 1})
