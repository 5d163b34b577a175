"""Profiles of GPUs that are not here: the names are those of a program that XLA compiled for them.

Each instruction of its text that runs has a kernel, as XLA's profiler writes it: the op is the innermost one
that was begun (`Thunk:#hlo_op=...#`), loops repeat what is in them and copy their condition to the host under
their own name, and collectives have a stream of their own. Lengths are made up; where they belong is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import pytest

import sbp
from benchmarks import cases
from benchmarks.cases import Case
from sbp.compat.untyped import struct
from sbp.passes.explain.measurement import kernel_estimate, steps_by_number
from sbp.passes.render.program_data import program_data
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.hlo.meter import COLLECTIVES, text_of
from sbp.runtime.hlo.parser import Computation, Instruction, Module, parse
from sbp.runtime.hlo.trip_counts import trip_count
from sbp.runtime.profile.step_breakdown import GPU_OPTIONS
from sbp.runtime.profile.trace import STEP, traced_steps
from sbp.runtime.profile.trace_alignment import MARK, ProgramReader, measured_step
from sbp.runtime.target.comparison import compare
from sbp.runtime.target.devices import absent_mesh
from tests.runtime.profile.test_trace import Space, op
from tests.runtime.target.plugin import needs_plugin

pytestmark = needs_plugin

NOTHING = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")
"""What launches no kernel."""
KERNEL_US, SENT_US, GAP_US, STEPS = 3, 7, 1, 3
"""Lengths that are made up, microseconds."""


def executed(module: Module, name: str) -> Iterator[tuple[str, Instruction]]:
    """What is launched, in order: the name that the profile gives it, and the instruction."""
    computation: Computation = module.computations[name]
    for x in computation.instructions.values():
        if x.opcode in NOTHING or x.opcode.endswith(("-done", "-update")):
            continue
        if x.opcode == "while":
            (body,) = x.called_computations("body")
            for _ in range(trip_count(module.computations, computation, x) or 1):
                yield x.name, x  # the condition, copied to the host
                yield from executed(module, body)
        elif x.opcode in ("call", "conditional"):
            for called in x.called_computations("to_apply", "branch_computations")[:1]:
                yield from executed(module, called)
        else:
            yield x.name, x


def is_sent(module: Module, x: Instruction) -> bool:
    """Whether a collective's kernel runs for it, on a stream of its own."""
    if x.opcode == "async-start":
        (called,) = x.called_computations("calls")
        inner = module.computations[called]
        return inner.instructions[inner.root].opcode in COLLECTIVES
    return x.opcode.removesuffix("-start") in COLLECTIVES


def traced(module: Module, devices: int) -> tuple[Any, float]:
    """A profile of some steps, and the seconds of all kernels of a step on a device."""
    header = module.header["name"]
    events: dict[str, list[Any]] = {"Stream #13(Compute)": [], "Stream #20(AllReduce)": []}
    windows, at, kernels = [], 10, 0
    for _ in range(STEPS):
        begun = at
        at += GAP_US
        for name, x in executed(module, module.entry):
            sends = is_sent(module, x)
            length = SENT_US if sends else KERNEL_US
            kernel = f"ncclDevKernel_{x.opcode}" if sends else f"{name.replace('.', '_')}_kernel"
            stream = "Stream #20(AllReduce)" if sends else "Stream #13(Compute)"
            events[stream].append((kernel, at, length, op(name, hlo_module=header)))
            at += length + GAP_US
            kernels += 0 if sends else length
        # A copy that no program has begun.
        events["Stream #13(Compute)"].append(("MemcpyD2D", at, KERNEL_US, {}))
        at += KERNEL_US + GAP_US
        windows.append((STEP, begun, at - begun, {}))
    space = Space()
    space.plane("/host:CPU", {"python": windows})
    for d in range(devices):
        space.plane(f"/device:GPU:{d}", events)
    return space.read(), (kernels / STEPS + KERNEL_US) * 1e-6


def abstract(built: CompiledProgram) -> list[jax.ShapeDtypeStruct]:
    """The arguments, and what is closed over."""
    assert built.plan.physical is not None
    graph = built.plan.physical.graph
    return [struct(graph.values[v].shape, graph.values[v].dtype) for v in graph.inputs]


CASES = {
    "a GPT, 2 x 4": ((2, 4), lambda: cases.gpt_case("2d", (2, 4), 1)),
    "a scan, weights split": ((8,), lambda: cases.scan_case("tensor", (8,), 12)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_every_kernel_has_its_place(name: str) -> None:
    shape, make = CASES[name]
    case: Case = make()
    placement = sbp.placement("h100", shape=shape)
    program = sbp.compile(case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1))
    built = program._prepare(case.shapes(), {})[1]
    assert isinstance(built, CompiledProgram) and built.plan.physical is not None
    plan, mesh = built.plan, absent_mesh(placement)
    marks = {id(step): f"{MARK}{k}" for k, (step, _) in enumerate(built.plan.physical.walk())}
    # As runtime/profile/step_breakdown.py compiles what is profiled, for devices that are not here.
    traced_program = built.jit(mesh, built.key_counts, marks).trace(*abstract(built))
    lowered = traced_program.lower(lowering_platforms=("cuda",))
    compiled = lowered.compile(compiler_options=dict(GPU_OPTIONS))
    module = parse(text_of(compiled))
    data = program_data(plan)
    assert data is not None
    reader = ProgramReader(module, [kernel_estimate(s) for s, _ in steps_by_number(data["steps"])])
    beside = compare(plan, compiled, None, lambda: lowered.as_text(debug_info=True))
    profile, kernels = traced(module, 8)
    steps = traced_steps(profile, module.header["name"], reader.readers)
    found = measured_step(steps, beside, reader, list(range(8)), "by a profile that is made up")
    # The parts are the step.
    parts = found.kernel_seconds + found.exposed_seconds + found.waiting_seconds + found.unclaimed_seconds
    assert parts == pytest.approx(found.seconds, rel=1e-6)
    # Every kernel is somebody's: of a step of the program, or of XLA's own, and then it has a name.
    assert found.kernel_seconds == pytest.approx(kernels, rel=1e-6)
    assert all(s.label for s in found.spans)
    own = {s.label for s in found.spans if s.step < 0}
    assert "MemcpyD2D" in own and math.fsum(found.step_seconds) > 0.8 * found.kernel_seconds
    assert "not named" not in own
    # Every collective has its own time, and as often as it is executed.
    for fate, c in zip(beside.rows, found.collectives, strict=False):
        sites = [site for site in beside.collectives if fate.row in site.rows]
        assert fate.removed or (c.seconds is not None and c.times == sum(s.count for s in sites)), c
    rows = [c for c in found.collectives if c.name]
    assert len(rows) == len(plan.collectives) and not [c for c in found.collectives if not c.name]
    loops = [x.name for _, x in reader.module.instructions if x.opcode == "while"]
    assert bool(loops) == ("scan" in name) and {s.label for s in found.spans} >= set(loops)
    # What runs in a loop is counted for each trip.
    assert not loops or max(Counter(s.label for s in found.spans).values()) == 12
