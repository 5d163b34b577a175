"""That all processes are about to run the same program: what each has lowered is compared first."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import jax

from sbp import untyped
from sbp.passes.face import PipelinePlan, Plan
from sbp.passes.pipeline.slots import Cut
from sbp.passes.plan.digest import graph_digest
from sbp.passes.program.graph import Const, Graph, Value
from sbp.runtime.lower import Jitted
from sbp.runtime.processes.team import team

_CALLBACK = re.compile(r"callback.*")
"""What the host computes stands in a program by its address in the process."""


def check_same(jitted: Jitted, inputs: Sequence[Value], plan: Plan) -> None:
    """Compares a program with those of other processes, where there are any; nothing has been run or placed.

    Arguments:
      inputs: of the program, closed-over arrays included.

    Raises:
      ProcessError: if they differ, on all processes.
    """
    others = team()
    if others is not None:
        structs = [untyped.struct(v.shape, v.dtype) for v in inputs]
        others.agree(plan.name, comparable(jitted.lower(*structs)))


def check_same_pipeline(plan: PipelinePlan, graph: Graph, cuts: Sequence[Cut]) -> None:
    """The same for a program with stages, of which each process compiles its own only: what all have is its
    plan, and the function that it was made of.

    Raises:
      ProcessError: if they differ, on all processes.
    """
    others = team()
    if others is None:
        return
    lines = [
        graph_digest(graph).text,
        *(repr(x.value) for n in graph.walk() for x in n.inputs if isinstance(x, Const)),
        *(f"{s.physical.placement} {s.physical.inputs} {s.physical.outputs}" for s in cuts),
        *(f"{box.value} {box.move}" for s in cuts for box, _ in s.physical.boxes()),
        str(plan.schedule and plan.schedule.orders),
    ]
    others.agree(plan.name, "\n".join(lines))


def begin_together(plan: Plan | PipelinePlan, compiled: Callable[[], object]) -> None:
    """Waits until all processes have compiled a program, before any runs it.

    A collective that somebody begins half a minute before the others is an error of gloo, the first time that
    these devices meet; and a compilation may take as long as it likes.

    Arguments:
      compiled: compiles it; called where there are other processes.
    """
    others = team()
    if others is not None:
        compiled()
        others.gathered(f"{plan.name} to be compiled", None)


def note_call(plan: Plan | PipelinePlan, graph: Graph) -> None:
    """Notes that arguments of a program are placed, by themselves or to run it, for processes that wait for
    this one."""
    others = team()
    if others is not None:
        others.calls.begins(lambda: (plan.name, *(_named(graph.values[v]) for v in graph.inputs)))


def _named(value: Value) -> str:
    return f"{value.name}: {value.dtype}{list(value.shape)}"


def comparable(lowered: jax.stages.Lowered) -> str:
    """The text of a lowered program, without what is another in each process."""
    return _CALLBACK.sub("callback", lowered.as_text())
