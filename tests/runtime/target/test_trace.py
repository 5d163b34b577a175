"""Traces of simulated steps: tracks, names and times."""

import json
from typing import Any

import jax
import jax.numpy as jnp

import sbp
from sbp.runtime.target.events import (
    HOST,
    KERNELS,
    LOOPS,
    NETWORK,
    NVLINK,
    Event,
    Simulation,
    names_of,
    trace_json,
)

EVENTS = (
    Event("while.1", "while", LOOPS, 0.0, 10e-6),
    Event("fusion.1", "fusion", KERNELS, 0.0, 2e-6, 5, bytes=1e6, flops=2e6, source="measured"),
    Event("all-reduce-start.1", "all-reduce-start", NVLINK, 2e-6, 9e-6, 5, 20e-6, ("fusion.2",), 4096.0),
    Event("fusion.2", "fusion", KERNELS, 2e-6, 5e-6, 5),
)
STEP = Simulation(10e-6, 5e-6, {NVLINK: 35e-6}, 20e-6, 1e7, 0.5, EVENTS)


def written(**given: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trace_json(STEP, **given))["traceEvents"]
    return found


def test_a_track_for_each_resource_that_is_used() -> None:
    names = {e["tid"]: e["args"]["name"] for e in written() if e["name"] == "thread_name"}
    assert list(names.values()) == [LOOPS, KERNELS, NVLINK]
    assert NETWORK not in names.values() and HOST not in names.values()
    tracks = {e["name"]: names[e["tid"]] for e in written() if e["ph"] == "X"}
    assert tracks["all-reduce-start.1"] == NVLINK
    assert tracks["fusion.1"] == tracks["fusion.2"] == KERNELS


def test_names_are_those_of_the_plan_and_of_the_user() -> None:
    rows, paths = {"all-reduce-start.1": "row12 all_reduce of w"}, {"fusion.1": "layer0/add", "while.1": ""}
    names = [e["name"] for e in written(rows=rows, paths=paths) if e["ph"] == "X"]
    assert names == ["while.1", "layer0/add", "row12 all_reduce of w", "fusion.2"]


def test_times_are_in_microseconds() -> None:
    (event,) = [e for e in written() if e["name"] == "all-reduce-start.1"]
    assert (event["ts"], round(event["dur"], 6)) == (2.0, 7.0)
    assert event["args"]["exposed_us"] == 20.0
    assert event["args"]["during"] == ["fusion.2"]
    assert (event["args"]["times"], event["args"]["bytes"]) == (5, 4096.0)


def test_the_title_says_what_a_step_takes() -> None:
    (title,) = [e["args"]["name"] for e in written(name="gpt") if e["name"] == "process_name"]
    assert title == "gpt, 0.010 ms, 0.020 ms exposed"


def test_a_step_of_nothing() -> None:
    empty = Simulation(0.0, 0.0, {}, 0.0, 0.0, 0.0, ())
    assert len(json.loads(trace_json(empty))["traceEvents"]) == 1


def test_names_lead_back_to_plan_and_user() -> None:
    """Of a program that is compiled for the CPU: names are found the same way."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("layer0"):
            return (x @ w).sum()

    program = sbp.compile(loss, sbp.placement("cpu", shape=(2,)), in_sbp=([sbp.S(0)], [sbp.S(1)]))
    args = jnp.ones((8, 4)), jnp.ones((2, 8))
    compiled = program.lower(*args).compile()
    rows, paths = names_of(compiled, program.plan(*args))
    assert len(rows) == 1
    (text,) = rows.values()
    assert text.startswith("row0 all_reduce of ")
    assert any("layer0" in path for path in paths.values())
    assert names_of(compiled)[0] == {}
