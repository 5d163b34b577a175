"""Checks that all processes are about to run the same program: the lowered programs are compared first."""

import re
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from sbp.compat import untyped
from sbp.passes.face import Plan
from sbp.passes.pipeline.slots import Cut
from sbp.passes.plan.digest import graph_digest
from sbp.passes.program.graph import Const, Graph, Value
from sbp.runtime.lower.lowering import JittedFunction
from sbp.runtime.processes.flight_recorder import SharedProgram
from sbp.runtime.processes.process_group import process_group

_CALLBACK = re.compile(r"callback.*")
"""What the host computes stands in a program by its address in the process."""
_DEVICES = re.compile(
    r"(?:replica_groups|source_target_pairs) = dense<(.*?)> : tensor<(\d+)x(\d+)xi64>", re.DOTALL
)
_AXES = re.compile(r"axes = \[(.*?)\]")
_NAME = re.compile(r'name = "(.*?)"')
_NUMBER = re.compile(r"-?\d+")


def check_same(
    jitted: JittedFunction,
    inputs: Sequence[Value],
    lies: Sequence[NamedSharding],
    plan: Plan,
    beside: Sequence[untyped.PyTree] = (),
) -> SharedProgram | None:
    """Compares a lowered program with those of the other processes, before anything runs or is placed.

    Arguments:
      inputs, lies: the inputs, closed-over arrays included, and their shardings.
      beside: the shapes of what it takes beside them.

    Returns:
      The call that all processes must make in one order; None if no process needs another one to run it.

    Raises:
      ProcessError: if the programs differ; on all processes.
    """
    others = process_group()
    if others is None:
        return None
    structs = [untyped.struct(v.shape, v.dtype, sharding=s) for v, s in zip(inputs, lies, strict=True)]
    text = comparable(jitted.lower(*structs, *beside))
    digest = others.agree(plan.name, text)
    mesh = plan.placement.mesh
    return _shared(plan, inputs, digest) if needs_all(text, mesh, others.count) else None


def check_same_pipeline(plan: Plan, graph: Graph, cuts: Sequence[Cut]) -> SharedProgram | None:
    """The same for a program with stages: each process compiles its own, so plans and graphs are compared.

    Raises:
      ProcessError: if they differ; on all processes.
    """
    others = process_group()
    if others is None:
        return None
    lines = [
        graph_digest(graph).text,
        *(repr(x.value) for n in graph.walk() for x in n.inputs if isinstance(x, Const)),
        *(f"{s.physical.placement} {s.physical.inputs} {s.physical.outputs}" for s in cuts),
        *(f"{box.value} {box.move}" for s in cuts for box, _ in s.physical.boxes()),
        str(plan.schedule and plan.schedule.orders),
    ]
    digest = others.agree(plan.name, "\n".join(lines))
    held = {d.process_index for s in cuts for d in s.physical.placement.mesh.devices.flat}
    inputs = [graph.values[v] for v in graph.inputs]
    return _shared(plan, inputs, digest) if len(held) == others.count else None


def _shared(plan: Plan, inputs: Sequence[Value], digest: str) -> SharedProgram:
    return SharedProgram(digest[:16], (plan.name, *(f"{v.name}: {v.dtype}{list(v.shape)}" for v in inputs)))


def needs_all(text: str, mesh: Mesh, count: int) -> bool:
    """Whether a program on devices of all processes has a collective between processes.

    Arguments:
      text: the lowered program; versions of JAX differ in whether it names mesh axes or devices.
      count: the number of processes.
    """
    held = np.vectorize(lambda d: d.process_index, otypes=[int])(mesh.devices)
    if len({*held.flat}) < count:
        return False
    across = {name for i, name in enumerate(mesh.axis_names) if (np.diff(held, axis=i) != 0).any()}
    if any(str(name) in across for axes in _AXES.findall(text) for name in _NAME.findall(axes)):
        return True
    return any(len({held.flat[d] for d in group}) > 1 for group in _groups(text))


def _groups(text: str) -> Iterator[list[int]]:
    """The groups of devices of the collectives in a lowered program that names devices.

    >>> [*_groups("replica_groups = dense<[[0, 1], [2, -1]]> : tensor<2x2xi64>")]
    [[0, 1], [2]]
    """
    for values, rows, columns in _DEVICES.findall(text):
        if values.startswith('"'):  # many are written as bytes
            flat = np.frombuffer(bytes.fromhex(values.strip('"')[2:]), np.int64)
        else:
            flat = np.array([int(x) for x in _NUMBER.findall(values)], np.int64)
        for row in np.broadcast_to(flat, int(rows) * int(columns)).reshape(int(rows), int(columns)):
            yield [int(d) for d in row if d >= 0]  # groups of several sizes are filled with -1


def begin_together(plan: Plan, compiled: Callable[[], object]) -> None:
    """Waits until all processes have compiled a program, before any runs it.

    Gloo fails if one process begins a first collective half a minute before the others, and compiling may
    take any time.

    Arguments:
      compiled: compiles it; called if there are other processes.
    """
    others = process_group()
    if others is not None:
        compiled()
        others.gather(f"{plan.name} to be compiled", None)


def note_call(program: SharedProgram | None) -> None:
    """Notes a call of a program: all processes must call the same programs in the same order.

    Arguments:
      program: None if no other process takes part.
    """
    if program is not None:
        others = process_group()
        assert others is not None
        others.calls.begins(program)


def explain(error: BaseException) -> None:
    """Raises the cause of an error of collectives, if it can be proven.

    Raises:
      ProcessError: if the processes run different programs.
    """
    others = process_group()
    why = None if others is None else others.explain_error(error)
    if why is not None:
        raise why from error


def comparable(lowered: jax.stages.Lowered) -> str:
    """The text of a lowered program without addresses, which differ between processes."""
    return _CALLBACK.sub("callback", lowered.as_text())
