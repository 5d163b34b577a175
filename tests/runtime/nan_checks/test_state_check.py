"""What is not finite, and was, is not saved; what always was so is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sbp
from sbp.errors import NonFiniteError
from sbp.runtime.checkpoint.checkpoints import Checkpoints
from sbp.runtime.nan_checks.state_check import traits_of

NAN, INF = float("nan"), float("inf")


def state_of(**changes: Any) -> dict[str, Any]:
    """A state with leaves of every kind; masks with -inf are good from the beginning."""
    mesh = sbp.placement("cpu", shape=(8,)).mesh
    split, whole = (
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("x",), ())
    )
    state: dict[str, Any] = {
        "params": {"w": jax.device_put(jnp.ones((8, 4)), split), "b": jax.device_put(jnp.ones(3), whole)},
        "opt_state": [jnp.ones(4, jnp.bfloat16), np.ones(2)],
        "mask": jnp.array([0.0, -INF]),
        "key": jax.random.key(0),
        "count": 3,
        "rate": 0.5,
    }
    for name, value in changes.items():
        top, _, below = name.partition("__")
        if below:
            inner = state[top]
            inner[int(below) if below.isdigit() else below] = value
        else:
            state[top] = value
    return state


BAD = {
    "params__w": jnp.ones((8, 4)).at[5, 2].set(NAN),
    "params__b": jnp.array([1.0, INF, 1.0]),
    "opt_state__0": jnp.array([1, 1, NAN, 1], jnp.bfloat16),
    "opt_state__1": np.array([1.0, NAN]),
    "mask": jnp.array([NAN, -INF]),
    "rate": NAN,
}
SIMPLE = {name: name.replace("__", "/") for name in BAD}


@pytest.mark.parametrize("name", BAD)
def test_a_leaf_that_became_bad_is_named_and_nothing_is_saved(name: str, tmp_path: Path) -> None:
    runs = Checkpoints(tmp_path)
    runs.save(state_of(), step=1)
    bad = state_of(**{name: BAD[name]})
    with pytest.raises(NonFiniteError, match=r"leaves that are finite, as they were") as e:
        runs.save(bad, step=2)
    for part in SIMPLE[name].split("/"):
        assert part in e.value.problems[0].got
    runs.wait()
    assert runs.steps == [1]
    with pytest.raises(NonFiniteError):
        runs.check(bad, step=2)
    runs.save(bad, step=2, exempt=[SIMPLE[name]])
    runs.save(bad, step=3)  # so was the last one that was good
    runs.close()
    assert runs.steps == [1, 2, 3]


def test_the_last_good_state_is_what_was_restored_or_noted(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as runs:
        runs.save(state_of(), step=1)
    again = Checkpoints(tmp_path)
    again.restore(state_of())
    with pytest.raises(NonFiniteError):
        again.check(state_of(rate=INF), step=2)
    noted = Checkpoints(tmp_path / "other")
    noted.baseline(state_of(rate=INF))
    noted.check(state_of(rate=INF), step=1)
    with pytest.raises(NonFiniteError, match="step 1"):
        noted.check(state_of(rate=NAN), step=1)


def test_what_nothing_is_known_of_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sbp"), Checkpoints(tmp_path) as runs:
        runs.save(state_of(rate=NAN), step=1)
    assert "['rate']" in caplog.text and "not finite in the first step that is saved" in caplog.text


def test_parameters_that_became_zero_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not the sums of an optimizer, which are zero every so often."""
    with caplog.at_level(logging.WARNING, "sbp"), Checkpoints(tmp_path) as runs:
        runs.save(state_of(), step=1)
        runs.save(state_of(opt_state__1=np.zeros(2)), step=2)
        assert "zero" not in caplog.text
        runs.save(state_of(params__b=jnp.zeros(3)), step=3)
        assert "step 3: all elements of ['params']['b'] have become zero" in caplog.text
        caplog.clear()
        runs.save(state_of(params__b=jnp.zeros(3)), step=4)
    assert "zero" not in caplog.text


def test_one_reduction_looks_at_all_arrays_of_a_placement() -> None:
    """One program for the devices together, and one for what lies on one device."""
    state = state_of()
    traits_of(state)
    with jax.log_compiles(), jax.check_tracer_leaks(False):
        assert traits_of(state) == {"['mask']": frozenset({"inf"})}


def test_a_state_of_stages_is_looked_at(tmp_path: Path) -> None:
    whole = sbp.placement("cpu", shape=(2, 4), axes=("stage", "data"))
    first, second = whole.split("stage")
    laid = [
        jax.device_put(jnp.ones((4, 2)), jax.sharding.NamedSharding(p.mesh, jax.sharding.PartitionSpec()))
        for p in (first, second)
    ]
    with Checkpoints(tmp_path) as runs:
        runs.save(laid, step=1)
        with pytest.raises(NonFiniteError, match=r"\[1\] \(nan\)"):
            runs.save([laid[0], laid[1] * NAN], step=2)
