"""The benchmark of one GPU, as far as it goes without one."""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import pytest

import sbp
from benchmarks.cases import mlp_case
from benchmarks.gpu import single
from benchmarks.gpu.single import SingleRow, busy_seconds, chip_of, kernel_seconds, summary, table


@dataclass
class Named:
    """A plane, a line or an event of a profile."""

    name: str = ""
    planes: list[Any] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    start_ns: float = 0.0
    duration_ns: float = 0.0


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(platform: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(
        SystemExit, match=r"no GPU here.*\[test,cuda\].*benchmarks.gpu_target.*Unknown backend gpu"
    ):
        single.main([])


def test_chips_by_what_their_driver_calls_them() -> None:
    for name, said in (("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200"), ("b200", "NVIDIA B200")):
        chip = chip_of(said)
        assert chip is not None and chip.name == name
    assert chip_of("NVIDIA GeForce RTX 4090") is None


def test_kernels_on_two_streams_count_once() -> None:
    events = [Named("a", start_ns=0, duration_ns=4e6), Named("b", start_ns=1e6, duration_ns=5e6)]
    streams = [Named("Stream #1(Compute)", events=events[:1]), Named("Stream #2", events=events[1:])]
    others = [Named("XLA Ops", events=[Named("c", start_ns=0, duration_ns=9e9)])]
    planes = [Named("/device:GPU:0 NVIDIA", lines=[*streams, *others]), Named("/host:CPU", lines=others)]
    assert kernel_seconds(Named(planes=planes)) == pytest.approx(6e-3)
    assert math.isnan(kernel_seconds(Named(planes=planes[1:])))
    assert busy_seconds([]) == 0.0


def test_a_model_on_one_device_of_a_cpu() -> None:
    """All of it but the kernels, which only a GPU's profile has."""
    row = single.measure("mlp", mlp_case("data", (1,), 2), sbp.placement("cpu", shape=(1,)), None, 0.0)
    assert row.jit_step_seconds > 0 and 0.1 < row.step_ratio < 10 and math.isnan(row.kernel_seconds)
    assert "mlp" in table([row]) and "not within 20%: mlp" in summary([row])


def test_the_simulator_s_error_is_relative_to_the_kernels() -> None:
    rows = [
        SingleRow(name, 0.010, 1.01, 0.99, 0.009, 0.009, 0.008, s)
        for name, s in (("a", 0.0081), ("b", 0.012))
    ]
    assert [f"{r.simulation_error:+.2f}" for r in rows] == ["-0.10", "+0.33"]
    assert summary(rows).endswith("not within 20%: b +33%")
    assert len({line.count("|") for line in table(rows).splitlines()}) == 1
