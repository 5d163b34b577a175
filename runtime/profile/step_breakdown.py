"""Runs steps under JAX's profiler, and breaks one of them down by kernel, collective and line."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from sbp.compat.untyped import Leaf, block_until_ready
from sbp.passes.explain.measurement import MeasuredStep, kernel_estimate, steps_by_number
from sbp.passes.render.program_data import program_data
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.hlo.meter import text_of
from sbp.runtime.hlo.parser import parse
from sbp.runtime.profile.trace import STEP, HasPlanes, traced_steps
from sbp.runtime.profile.trace_alignment import MARK, ProgramReader, measured_step
from sbp.runtime.target.comparison import compare

HOW = "by JAX's profiler"
STEPS = 5
"""Steps that are recorded, after one that is not."""
GPU_OPTIONS: Mapping[str, str] = {"xla_gpu_enable_command_buffer": ""}
"""Kernels inside a CUDA graph have no op in a profile: the program is compiled without such graphs."""


class BreakdownError(Exception):
    """A step that could not be broken down; its text has the reason."""


def measure_step(built: CompiledProgram, fresh: Callable[[], Sequence[Leaf]]) -> MeasuredStep:
    """The breakdown of a step of a program.

    The program is compiled once more, with the number of its step in the name of every instruction; nothing
    else differs.

    Arguments:
      fresh: makes the arguments of a call, which the call may donate.

    Raises:
      BreakdownError: if the profiler records no ops.
    """
    plan, (_, _, consts) = built.plan, built.executable
    physical = plan.physical
    assert physical is not None
    mesh = physical.placement.mesh
    # By identity: equal steps run at different times.
    marks = {id(step): f"{MARK}{k}" for k, (step, _) in enumerate(physical.walk())}
    lowered = built.jit(mesh, built.key_counts, marks).lower(*built.place(fresh()), *consts)
    on_gpu = physical.placement.platform == "gpu"
    compiled = lowered.compile(compiler_options=dict(GPU_OPTIONS) if on_gpu else None)
    module = parse(text_of(compiled))
    program = program_data(plan)
    assert program is not None
    reader = ProgramReader(module, [kernel_estimate(s) for s, _ in steps_by_number(program["steps"])])
    beside = compare(plan, compiled, None, lambda: lowered.as_text(debug_info=True))

    def run(args: Sequence[Leaf]) -> None:
        block_until_ready(compiled(*args, *consts))

    profile = record_steps(lambda: built.place(fresh()), run)
    found = traced_steps(profile, module.header["name"], reader.readers)
    if not found or not any(step.events for step in found):
        platform = physical.placement.platform
        raise BreakdownError(f"JAX's profiler says nothing of the ops of a step on {platform} devices")
    return measured_step(found, beside, reader, local_devices(mesh), HOW)


def record_steps(fresh: Callable[[], Sequence[Leaf]], run: Callable[[Sequence[Leaf]], None]) -> HasPlanes:
    """The trace of some steps by JAX's profiler, each in an event of its own.

    Arguments:
      fresh: makes the arguments of a step.
      run: runs one, and waits for its results.

    Raises:
      BreakdownError: if the profiler cannot be started, or has written nothing.
    """
    run(fresh())
    with tempfile.TemporaryDirectory() as folder:
        try:
            with jax.profiler.trace(folder, profiler_options=_options()):
                for _ in range(STEPS):
                    args = block_until_ready(fresh())
                    with jax.profiler.TraceAnnotation(STEP):
                        run(args)
        except RuntimeError as e:
            raise BreakdownError(f"JAX's profiler cannot be started: {e}") from None
        files = sorted(Path(folder).rglob("*.xplane.pb"))
        if not files:
            raise BreakdownError("JAX's profiler has written nothing")
        profile: HasPlanes = jax.profiler.ProfileData.from_file(str(files[-1]))
        return profile


def _options() -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it takes time, and says nothing of ops
    return options


def local_devices(mesh: Mesh) -> list[int]:
    """Per partition, the name of its device in a profile; devices of other processes are not recorded."""
    here = jax.process_index()
    return [
        d.local_hardware_id if d.process_index == here else -1 - k for k, d in enumerate(mesh.devices.flat)
    ]
