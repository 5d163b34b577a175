"""Lowers and compiles programs for the devices of a placement, present or absent."""

import functools
import math
from collections.abc import Sequence

import jax

from sbp.compat.gpu import NotHere
from sbp.compat.untyped import struct
from sbp.errors import PlacementError
from sbp.placement import Placement
from sbp.runtime.ahead_of_time.pipeline import pipeline_report
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.lower.lowering import shardings
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.report.report import PipelineReport
from sbp.runtime.target.devices import absent_mesh, chip_of, cudnn_of, missing_devices, topology_of


def lowered_for(
    built: CompiledProgram,
    placement: Placement,
    machine: Sequence[int] | None,
    avals: Sequence[jax.ShapeDtypeStruct],
) -> jax.stages.Lowered:
    """The lowered program of one placement.

    Arguments:
      machine: `Options(topology=...)`.
      avals: of its arguments, closed-over arrays included.
    """
    try:
        jitted, beside = built.lowered_like(placement.mesh)
        return jitted.lower(*_lying(built, avals), *beside)
    except PlacementError:
        problem = missing_devices(placement)
    mesh = placement.abstract_mesh if problem else absent_mesh(placement, machine)
    with cudnn_of(placement):
        jitted, beside = built.lowered_like(mesh)
        traced = jitted.trace(*avals, *beside)
        lowered: jax.stages.Lowered = traced.lower(lowering_platforms=(_platform(placement),))
    return NotHere(lowered, problem) if problem else lowered


def _lying(built: CompiledProgram, avals: Sequence[jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of arguments with their shardings; a mesh with explicit axes has them in its types."""
    physical = built.plan.physical
    assert physical is not None
    ins, _ = shardings(physical, physical.placement.mesh)
    return [
        struct(a.shape, a.dtype, weak_type=a.weak_type, sharding=s) for a, s in zip(avals, ins, strict=True)
    ]


def report_of_stages(
    built: CompiledPipeline, placement: Placement, machine: Sequence[int] | None
) -> PipelineReport:
    """The report of a program with stages.

    Raises:
      PlacementError: if its devices are absent and no compiler for them is installed.
    """
    chip, domain = chip_of(placement), domain_devices(placement, machine)
    try:
        placement.mesh  # noqa: B018  (whether its devices are here)
    except PlacementError:
        if chip is not None:  # one machine for all stages, which are parts of it
            machine = topology_of(placement, machine)
        absent = functools.partial(absent_mesh, topology=machine)
        with cudnn_of(placement):
            return pipeline_report(built, absent, chip, _platform(placement), domain)
    return pipeline_report(built, lambda p: p.mesh, chip, None, domain)


def domain_devices(placement: Placement, machine: Sequence[int] | None) -> int | None:
    """How many devices NVLink connects on the given machine; None for the default."""
    if machine is None or chip_of(placement) is None:
        return None
    return math.prod(topology_of(placement, machine)[1:])


def _platform(placement: Placement) -> str:
    """The name that JAX has for the platform of a placement."""
    return {"gpu": "cuda"}.get(placement.platform, placement.platform)
