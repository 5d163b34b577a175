"""Kernels beside their simulation, as far as it goes without a GPU."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

import sbp
from benchmarks.cases import mlp_case
from benchmarks.gpu import kernels
from benchmarks.gpu.kernels import HEADER, KernelRow, furthest, line, seconds_by_instruction
from sbp.rates.chips import CHIPS
from sbp.runtime.profile.trace import OpEvent, TracedStep


def test_only_gpus_whose_rates_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform: [SimpleNamespace(device_kind="NVIDIA GeForce")])
    with pytest.raises(SystemExit, match=r"no rates of 'NVIDIA GeForce'; known: a100, h100"):
        kernels.main([])


def test_an_instruction_takes_the_median_of_its_kernels_in_a_step() -> None:
    def step(*lengths: float) -> TracedStep:
        events = tuple(
            OpEvent(0, name, 1.0, 1.0 + s) for name, s in zip(("a", "b", "b"), lengths, strict=True)
        )
        return TracedStep(0.0, 9.0, events, surrounds=False)

    found = seconds_by_instruction([step(1, 2, 3), step(5, 1, 1), step(2, 1, 2)], {"b": "product"})
    assert found == pytest.approx({"a": 2, "product": 3})


def test_what_the_simulator_says_too_much_or_too_little() -> None:
    row = KernelRow("m", {"a": 3e-3, "b": 1e-3}, {"a": 1e-3, "c": 2e-3}, "", 5e-3, 2e9, 1e9)
    assert row.errors == [("a", pytest.approx(-2e-3)), ("c", 2e-3), ("b", -1e-3)]
    assert line(row) == "| m | 4.00 | 3.00 | 5.00 | -25% | 125% | 1.00 | 2.00 |"
    assert {text.count("|") for text in (*HEADER.splitlines(), line(row))} == {9}
    assert furthest(row).splitlines()[0].split() == [
        "-2000.0",
        "us",
        "3000.0",
        "measured",
        "1000.0",
        "simulated",
        "a",
    ]


def test_a_model_on_one_device_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but the simulation, which only knows GPUs."""
    nothing: Any = SimpleNamespace(events=())
    monkeypatch.setattr(kernels, "simulate", lambda text, chip: nothing)
    row = kernels.measure("mlp", mlp_case("data", (1,), 2), sbp.placement("cpu", shape=(1,)), CHIPS["h100"])
    assert sum(row.measured.values()) > 0 and set(row.measured) <= {"", *row_names(row)}
    assert row.compiled_bytes > 0 and row.planned_seconds > 0


def row_names(row: KernelRow) -> set[str]:
    """The instructions of its executable."""
    return {word.lstrip("%") for text in row.text.splitlines() for word in text.split()[:2]}
