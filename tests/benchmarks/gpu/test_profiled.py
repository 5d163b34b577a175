"""The measured step of GPUs, as far as it goes without one."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sbp
from benchmarks.gpu import profiled
from sbp import S


def test_without_a_gpu_it_says_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(platform: str) -> list[Any]:
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", none)
    with pytest.raises(SystemExit, match=r"benchmarks.gpu.profiled: no GPU here.*benchmarks.gpu_target"):
        profiled.main([])


@pytest.mark.full
def test_kernels_must_lead_back_to_the_program() -> None:
    program = sbp.compile(lambda x: jnp.sin(x) @ x.T, sbp.placement("cpu", shape=(2,)), in_sbp=[S(0)])
    profile = program.profile(jnp.ones((256, 256)))
    profiled.check(profile)
    step = profile.step
    assert step is not None
    strange = replace(step, step_seconds=(0.0,) * len(step.step_seconds), added_seconds=step.kernel_seconds)
    with pytest.raises(SystemExit, match="only 0% of the kernels' time leads back"):
        profiled.check(replace(profile, step=strange))
    with pytest.raises(SystemExit, match="not divided: the profiler is asleep"):
        profiled.check(replace(profile, step=None, no_breakdown_reason="the profiler is asleep"))
