"""What a program costs and sends, as a plan says it, and as which tensors of what it sends can be held."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from sbp.annotation import annotate_p
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.choices import PlanFigures, SentAt
from sbp.passes.explain.collectives import InnerCollective, communication_steps, row_name
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.reasons import Reasons
from sbp.passes.explain.targets import Target
from sbp.passes.physical.evaluate import OVERLAPPING, Evaluator
from sbp.passes.physical.program import Box, Flow, Physical
from sbp.passes.plan.bounds import least_kernel_seconds
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.cost import communication_seconds
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.program.names import PHASES, Names, common
from sbp.signature import format_sbp


def figures_of(plan: PlanData) -> PlanFigures:
    """What a plan costs."""
    return PlanFigures(plan.seconds, plan.step_seconds, plan.wire_bytes, plan.memory_bytes)


def figures_of_program(takes: Evaluator) -> PlanFigures:
    """What a program costs."""
    sent = sum(
        how.times * (takes.box_bytes(what) if isinstance(what, Box) else what.communication.wire_bytes)
        for what, how in communication_steps(takes.physical)
    )
    return PlanFigures(takes.seconds(), takes.schedule.seconds, sent, takes.peak_bytes())


def with_bounds(
    plan: PlanData,
    choice: ChoiceRecord,
    candidates: Candidates,
    boxings: Boxings,
    cheapest_seconds: float | None,
) -> PlanData:
    """A plan with its choice, and what is proven of it."""
    overlaps = boxings.network.hardware.platform in OVERLAPPING
    step_bound = least_kernel_seconds(candidates, boxings) if overlaps else choice.bound
    return replace(
        plan, bound=choice.bound, step_bound=step_bound, choice=choice, cheapest_seconds=cheapest_seconds
    )


def made_by(physical: Physical, values: Sequence[int]) -> str:
    """The op that makes some values, and its signatures; several, where not all have the same."""
    makers = Flow(physical).makers
    texts = []
    for v in values:
        if v in makers:
            node, s = makers[v]
            ends = (", ".join(map(format_sbp, lying)) for lying in s.signatures)
            texts.append(f"{node.op} at {node.source} as {' -> '.join(ends)}")
    every = dict.fromkeys(texts)
    more = [f"{len(every) - 2} other ways"] if len(every) > 2 else []
    return "; ".join([*itertools.islice(every, 2), *more])


GRADIENT = "gradient of "
"""How names of gradients begin."""


def sent_at(takes: Evaluator) -> tuple[SentAt, ...]:
    """What a program sends, by kind, line and shape."""
    physical = takes.physical
    reasons = Reasons(physical, Names(physical.graph, (), ()))
    found: dict[tuple[str, str, tuple[int, ...]], float] = {}
    for what, how in communication_steps(physical):
        if isinstance(what, Box):
            key = what.move.kind, str(reasons.source(what)), tuple(physical.sent_type(what)[0])
            seconds = takes.box_seconds(what)
        else:
            shape = physical.graph.operand(what.step.node.inputs[what.communication.operand]).shape
            key = what.communication.kind, str(what.step.node.source), tuple(shape)
            seconds = communication_seconds(what.communication, takes.network)
        found[key] = found.get(key, 0.0) + how.assumed_count * seconds
    return tuple(SentAt(*key, seconds) for key, seconds in found.items())


def moves_of(physical: Physical, c: Collective) -> list[Box | InnerCollective]:
    """What a row of a plan stands for: the moves, or what ops send."""
    whats = {row_name(i): what for i, (what, _) in enumerate(communication_steps(physical))}
    return [whats[name] for name in c.name.split("+") if name in whats]


def cause_of(reasons: Reasons, c: Collective) -> str:
    """The argument whose split leads to a row of a plan; "" for none."""
    moves = (what for what in moves_of(reasons.physical, c) if isinstance(what, Box))
    return next(filter(None, map(reasons.cause, moves)), "")


def sent_target(physical: Physical, c: Collective, ties: Sequence[int | None]) -> Target | None:
    """The tensors of a row of a plan: those of one kind, at rest or made by ops; None if they are neither.

    Arguments:
      c: with the names of all collectives that it stands for.
      ties: per result, the argument that it comes back as, or None.
    """
    graph, flow = physical.graph, Flow(physical)
    given = {v: i for i, v in enumerate(graph.inputs)}
    moves = moves_of(physical, c)
    leaves = {w.value for w in moves if isinstance(w, Box) and w.user < 0}
    results = [j for j, x in enumerate(graph.outputs) if isinstance(x, int) and x in leaves]
    sent = [w.value if isinstance(w, Box) else w.step.node.inputs[w.communication.operand] for w in moves]
    values = [v for v in dict.fromkeys(sent) if isinstance(v, int) and (v in given or v in flow.makers)]
    # What the user has annotated lies as that says.
    values = [v for v in values if v in given or flow.makers[v][0].op != annotate_p.name]
    if not values or not graph.values[values[0]].shape:
        return None
    # Tensors that lie alike are held together, as a name would mean them.
    first = graph.values[values[0]]
    alike = [
        v for v in values if (graph.values[v].shape, graph.values[v].dtype) == (first.shape, first.dtype)
    ]
    if results and (tie := ties[results[0]]) is not None:
        return Target(c.tensor, first.shape, first.dtype, (tie,), (), (), (physical.inputs[tie],))
    if results:
        j = results[0]
        return Target(c.tensor, first.shape, first.dtype, (), (j,), (), (physical.outputs[j],))
    if alike[0] in given:
        at = tuple(given[v] for v in alike)
        return Target(c.tensor, first.shape, first.dtype, at, (), (), (physical.inputs[at[0]],))
    lying = (flow.result_sbp[alike[0]], *(nd for _, nd in flow.readers.get(alike[0], ())))
    name = f"{c.tensor}, made at {flow.makers[alike[0]][0].source}"
    return Target(name, first.shape, first.dtype, (), (), tuple(alike), tuple(dict.fromkeys(lying)))


def hold_text(plan: PlanData, physical: Physical, target: Target) -> tuple[str, str]:
    """What to write to hold a target, and where."""
    if target.arguments:
        return "in_sbp", common(plan.in_paths[i] for i in target.arguments)
    if target.results:
        return "out_sbp", common(plan.out_paths[j] for j in target.results)
    v, names = target.values[0], Names(physical.graph, plan.in_paths, plan.out_paths)
    node = Flow(physical).makers[v][0]
    if names.of(v).startswith(GRADIENT):
        return "gradient", common(names.of(x).removeprefix(GRADIENT) for x in target.values)
    return "annotate" if names.phases[node.id] != PHASES[1] else "backward", str(node.source)


def is_gone(c: Collective, sent: Sequence[SentAt] | None, plan: PlanData) -> bool:
    """Whether a plan does without a collective of another, and does not send the same at another line.

    Arguments:
      sent: by the plan that may do without it; None where that is not known.
      plan: the other one.
    """
    if sent is None or any(s.key == (c.kind, c.source, c.shape) for s in sent):
        return False
    before = sum(x.seconds for x in plan.collectives if (x.kind, x.shape) == (c.kind, c.shape))
    return sum(s.seconds for s in sent if (s.kind, s.shape) == (c.kind, c.shape)) <= before - c.seconds / 2
