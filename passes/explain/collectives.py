"""The plan of a physical program: a row for everything that is sent, each with its cost and its reason."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sbp.communication.protocol import Communication
from sbp.passes.boxing.moves import itemsize, wire_bytes
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.reasons import Reasons
from sbp.passes.physical.evaluate import Evaluator, Execution, executions
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step
from sbp.passes.physical.step_schedule import ScheduledStep, trips_of
from sbp.passes.plan.cost import communication_seconds
from sbp.passes.program.graph import Const, Graph, Node
from sbp.passes.program.names import Names
from sbp.passes.program.views import communication_of
from sbp.rules.registry import unknown_functions

ROW_SCOPE = "sbp."


def explain(
    name: str,
    takes: Evaluator,
    bound: float,
    paths: tuple[Sequence[str], Sequence[str]],
    notes: Sequence[str],
) -> PlanData:
    """The plan of a physical program.

    Arguments:
      takes: the program with what it takes.
      bound: a proven lower bound on the seconds of every plan with these pins.
      paths: the names of arguments and of results.
    """
    physical, graph = takes.physical, takes.physical.graph
    reasons = Reasons(physical, Names(graph, *paths))
    step, sending = takes.schedule, communication_steps(physical)
    collectives = tuple(
        _moved(row_name(i), s, n, takes, reasons, step)
        if isinstance(s, Box)
        else _inside(row_name(i), s, n, takes, reasons, step)
        for i, (s, n) in enumerate(sending)
    )
    names = {id(s): row_name(i) for i, (s, _) in enumerate(sending) if isinstance(s, Box)}
    sent_in = {id(s): names[id(sent[0])] for sent in _messages(takes) for s in sent}
    collectives = tuple(
        replace(c, message=sent_in.get(id(s), "")) for c, (s, _) in zip(collectives, sending, strict=True)
    )
    return PlanData(
        name,
        physical.placement,
        takes.network.hardware,
        collectives,
        takes.seconds(),
        step.seconds,
        bound,
        takes.peak_bytes(),
        physical.inputs[: len(paths[0])],
        physical.outputs,
        tuple(paths[0]),
        tuple(paths[1]),
        (*notes, *_no_rule(graph, physical)),
        with_row_names(physical, reasons),
        donated=tuple(takes.donated),
    )


def row_name(position: int) -> str:
    """The name of a collective in the compiled program."""
    return f"row{position}"


def scope_of_rows(names: Sequence[str]) -> str:
    """The name scope of what is sent for some collectives; "" for none.

    >>> scope_of_rows(["row3", "row4"])
    'sbp.row3+row4'
    """
    return ROW_SCOPE + "+".join(names) if any(names) else ""


def with_row_names(physical: Physical, reasons: Reasons) -> Physical:
    """The same program, whose steps know their rows of the plan, and moves the line that caused them."""
    # By identity: two equal steps are two collectives, with a row each.
    rows: dict[int, list[str]] = {}
    for row, what, _ in rows_of(physical):
        step = what if isinstance(what, Box) else what.step
        rows.setdefault(id(step), []).append(row_name(row))

    def tell(step: Step) -> Step:
        own = tuple(dict.fromkeys(rows.get(id(step), ())))
        if isinstance(step, Box):
            return replace(step, source=reasons.source(step), rows=own)
        if isinstance(step, Border):
            return replace(step, bodies=tuple(tuple(map(tell, body)) for body in step.bodies))
        return replace(step, rows=own) if own else step

    return replace(physical, steps=tuple(map(tell, physical.steps)))


@dataclass(frozen=True, slots=True)
class InnerCollective:
    """A collective inside an op.

    Arguments:
      position: which of the op's collectives it is.
    """

    step: Compute
    communication: Communication
    position: int


def communication_steps(physical: Physical) -> list[tuple[Box | InnerCollective, Execution]]:
    """One per `Plan.collectives`: the moves and the ops that send something, and how often each is run."""
    first: dict[int, tuple[Box | InnerCollective, Execution]] = {}
    for row, what, how in rows_of(physical):
        first.setdefault(row, (what, how))
    return list(first.values())


def rows_of(physical: Physical) -> Iterator[tuple[int, Box | InnerCollective, Execution]]:
    """What sends something: its position in `Plan.collectives`, the move or the op, and how often it is run.

    Moves over groups of one device and of empty tensors send nothing. Several ops may ask
    for the same shards (a halo, in the forward pass and in the backward pass). XLA sends them once, so they
    are one row of the plan.
    """
    fresh = itertools.count()
    asked: dict[object, int] = {}
    for how in executions(physical.steps):
        step = how.step
        if isinstance(step, Box) and _sends(step, physical):
            yield next(fresh), step, how
        elif isinstance(step, Compute):
            communication = communication_of(
                physical.graph, step.node, step.strategy.signatures, physical.placement.shape
            )
            for k, t in enumerate(communication):
                version = step.node.inputs[t.operand], step.strategy.operands[t.operand]
                same = *version, t.axes, t.operand_part, how.times
                if t.operand_part is None or same not in asked:
                    asked[same] = next(fresh)
                yield asked[same], InnerCollective(step, t, k), how


def _messages(takes: Evaluator) -> Iterator[Sequence[Step]]:
    """The moves that XLA sends as one."""
    if not takes.hides:
        return
    steps = takes.physical.steps
    yield from ([steps[i] for i in members] for members in takes.whole.groups)
    for loop in (step for step, _ in takes.physical.walk() if isinstance(step, Border)):
        for trip in trips_of(loop, takes):
            yield from ([s for i in one if (s := trip.k.ops[i].step)] for one in trip.groups)


def _sends(box: Box, physical: Physical) -> bool:
    shape, dtype = physical.sent_type(box)
    return wire_bytes(box.move, shape, itemsize(box.move, dtype), physical.placement.shape) > 0


def _moved(
    name: str, box: Box, how: Execution, takes: Evaluator, reasons: Reasons, step: ScheduledStep
) -> Collective:
    placement, move = takes.physical.placement, box.move
    shape, dtype = takes.physical.sent_type(box)
    return Collective(
        kind=move.kind,
        tensor=reasons.names.of(box.value),
        shape=shape,
        dtype=str(dtype),
        before=move.before,
        after=move.after,
        axes=tuple(placement.axes[a] for a in move.axes),
        group_size=math.prod(placement.shape[a] for a in move.axes),
        count=how.times,
        wire_bytes=how.times * takes.box_bytes(box),
        seconds=how.assumed_count * takes.box_seconds(box),
        exposed_seconds=step.exposed_of(box),
        source=str(reasons.source(box)),
        reason=reasons.reason(box),
        name=name,
    )


def _inside(
    name: str,
    inside: InnerCollective,
    how: Execution,
    takes: Evaluator,
    reasons: Reasons,
    step: ScheduledStep,
) -> Collective:
    op, communication, placement = inside.step, inside.communication, takes.physical.placement
    x, nd = op.node.inputs[communication.operand], op.strategy.operands[communication.operand]
    value = takes.physical.graph.operand(x)
    return Collective(
        kind=communication.kind,
        tensor=op.node.op if isinstance(x, Const) else reasons.names.of(x),
        shape=value.shape,
        dtype=str(value.dtype),
        before=nd,
        after=nd,
        axes=tuple(placement.axes[a] for a in communication.axes),
        group_size=math.prod(placement.shape[a] for a in communication.axes),
        count=how.times,
        wire_bytes=how.times * communication.wire_bytes,
        seconds=how.assumed_count * communication_seconds(communication, takes.network),
        exposed_seconds=step.exposed_of(op, inside.position),
        source=str(op.node.source),
        reason=reasons.inner_reason(op, communication),
        name=name,
    )


def _no_rule(graph: Graph, physical: Physical) -> list[str]:
    """Ops that ran whole on every device because they have no rule, or none for what they hold or ask for."""
    found: dict[str, list[str]] = {}
    for step, _ in physical.walk():
        if isinstance(step, Compute) and (why := _why_whole(step.node)):
            found.setdefault(why, []).append(str(step.node.source))
    return [f"{why} ({', '.join(dict.fromkeys(at))})" for why, at in found.items()]


def _why_whole(node: Node) -> str:
    """Why an op runs whole whatever is planned, if it does."""
    op, rule, params = node.op, node.rule, node.params
    if rule is None:
        return f"no rule for {op}: gathered"
    functions = unknown_functions(rule, params)
    if functions:
        return f"no rule for {op} with a function as {', '.join(functions)}: gathered"
    why = rule.whole(params) if rule.whole is not None else ""
    return f"{op} runs whole: {why}" if why else ""
