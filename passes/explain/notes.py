"""Remarks on a plan: what the reader did not ask about and should know.

Among them: what is computed again because it is not kept, and work that all devices of an axis repeat
although an argument is split.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp

from sbp.layout import at_rest
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move
from sbp.passes.explain.plan import CUT_OFF, PlanData
from sbp.passes.physical.evaluate import Evaluator, executions
from sbp.passes.physical.program import Box, Compute, Physical
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.clusters import op_count
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.model import ChosenSignatures
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.passes.program.trace import TracedProgram
from sbp.placement import Placement
from sbp.signature import AUTO_SPLIT, B, NdSbp, P, Split, format_sbp, splits_of
from sbp.text.units import bytes_text, seconds_text

MOST_NAMED = 4
"""Arguments or results that a remark names."""


def uneven_notes(
    in_sbp: Sequence[NdSbp | None], out_sbp: Sequence[NdSbp | None], traced: TracedProgram, takes: Evaluator
) -> list[str]:
    """A remark for each pinned tensor that JAX cannot hold split: what that costs, what would avoid it."""
    graph, placement = traced.graph, takes.physical.placement
    ins = zip(traced.in_paths, graph.inputs, in_sbp, strict=False)
    outs = zip(traced.out_paths, graph.outputs, out_sbp, strict=True)
    sent, seconds = defaultdict[Operand, float](float), defaultdict[Operand, float](float)
    for box, n in takes.physical.boxes():
        sent[box.value] += n * takes.box_bytes(box)
        seconds[box.value] += n * takes.box_seconds(box)
    notes = []
    for path, x, nd in (*ins, *outs):
        value = graph.operand(x)
        asked = tuple(B if s == AUTO_SPLIT else s for s in nd or placement.ndim * (B,))
        rest = at_rest(value.shape, asked, placement.shape)
        if rest == asked:
            continue
        more = local_bytes(value.shape, value.dtype, rest, placement.shape)
        more -= local_bytes(value.shape, value.dtype, asked, placement.shape)
        for dim in sorted({s.dim for s in asked if isinstance(s, Split)}):
            group = math.prod(placement.shape[a] for a in splits_of(asked, dim))
            if value.shape[dim] % group:
                others = [str(Split(d)) for d in _even_dims(value.shape, asked, group, placement)]
                notes.append(
                    f"{path}: dim {dim} of size {value.shape[dim]} does not divide by {group}: "
                    f"{format_sbp(asked)} is {format_sbp(rest)} at rest, {bytes_text(more)} more per device"
                    + (f", and sends {bytes_text(sent[x])} in {seconds_text(seconds[x])}" if sent[x] else "")
                    + (f"; {' or '.join(others)} divides" if others else "")
                    + f"; a size of {-(-value.shape[dim] // group) * group} would stay split"
                )
    return notes


def whole_notes(
    asked: Sequence[NdSbp | None], chosen: Sequence[NdSbp], paths: Sequence[str]
) -> Iterator[str]:
    """A remark on arguments, or results, that `S(AUTO)` leaves whole along some axis: no dim divides."""
    left = [
        path
        for path, nd, found in zip(paths, asked, chosen, strict=False)
        if nd is not None and any(w == AUTO_SPLIT and s == B for w, s in zip(nd, found, strict=True))
    ]
    if left:
        more = f" and {len(left) - MOST_NAMED} more" if len(left) > MOST_NAMED else ""
        yield f"S(AUTO) leaves whole what has no dim that divides: {', '.join(left[:MOST_NAMED])}{more}"


def _even_dims(shape: Sequence[int], nd: NdSbp, group: int, placement: Placement) -> list[int]:
    """The dims that `group` devices could split evenly instead, beside what is split already."""
    taken = [math.prod(placement.shape[a] for a in splits_of(nd, d)) for d in range(len(shape))]
    return [d for d, n in enumerate(shape) if n and n % (group * taken[d]) == 0]


def effect_notes(graph: Graph, placement: Placement) -> list[str]:
    """A remark for each pure callback: every device executes it."""
    found = {n.source: n.op for n in graph.walk() if n.op == "pure_callback"}
    if placement.size == 1:
        return []
    return [f"{op} at {at} runs on each of the {placement.size} devices" for at, op in found.items()]


def parts_notes(physical: Physical) -> tuple[str, ...]:
    """Says which ops multiply the parts of a sum by what is known only when the program runs."""
    graph = physical.graph
    at = [
        f"{step.node.op} at {step.node.source}"
        for step, _ in physical.walk()
        if isinstance(step, Compute) and _scales_parts(graph, step)
    ]
    places = list(dict.fromkeys(at))
    if not places:
        return ()
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    return (
        f"parts of a sum are multiplied before they are added up ({places[0]}{more}): where a factor is "
        "infinite that gives NaN; Options(strict_nonfinite=True) adds up first",
    )


def _scales_parts(graph: Graph, step: Compute) -> bool:
    """Whether along some axis an op multiplies the parts of a sum by a float that the run computes."""
    node = step.node
    factors = [
        i
        for i, x in enumerate(node.inputs)
        if jnp.issubdtype(graph.operand(x).dtype, jnp.inexact) and not isinstance(x, Const)
    ]
    return any(r.multiplies and any(r.operands[i] != P for i in factors) for r in step.strategy.rows)


def strict_notes(strict: PlanData, usual: PlanData) -> tuple[str, ...]:
    """What it takes on the wire to add up every sum before anything is computed from it."""
    more = strict.wire_bytes - usual.wire_bytes
    return (
        f"strict_nonfinite: every sum is added up before anything is computed from it: {more:+,.0f} bytes on "
        f"the wire ({strict.wire_bytes:,.0f}, {usual.wire_bytes:,.0f} without)",
    )


def fitted_note(limit_bytes: float, needed_bytes: float, fastest_seconds: float, seconds: float) -> str:
    """Of a plan that is not the fastest one because that needs too much memory.

    >>> fitted_note(8e10, 9e10, 2.0, 2.1).split("; ")[1]
    'the step of this one is 5.0 % longer'

    Arguments:
      fastest_seconds, seconds: of a step.
    """
    more = max(100 * (seconds / fastest_seconds - 1), 0.0) if fastest_seconds > 0 else 0.0
    return (
        f"planned to fit into {bytes_text(limit_bytes)} per device: the fastest plan would need "
        f"{bytes_text(needed_bytes)}; the step of this one is {more:.{1 if more < 10 else 0}f} % longer"
    )


def again_notes(physical: Physical) -> tuple[str, ...]:
    """Says how much is sent again for later uses, which would need memory if it were kept."""
    made = Counter((s.value, s.move) for s in physical.steps if isinstance(s, Box) and s.move.is_collective)
    again = {value for (value, _), times in made.items() if times > 1}
    if not again:
        return ()
    whose = "1 tensor is" if len(again) == 1 else f"{len(again)} tensors are"
    return (f"{whose} boxed again for later uses instead of being kept, since memory is short",)


LARGE_NOTE = "the program is too large on so many axes: no plan but the cheapest was looked at with overlap"


def cut_note(time_limit_seconds: float | None) -> str:
    """Of a search that the user's time has ended.

    >>> cut_note(5.0)
    'the search was cut off by Options(time_limit=5): a faster plan may be found with Options(time_limit=20)'
    """
    limit = time_limit_seconds or 0.0
    more = f"Options(time_limit={4 * limit:g})" if limit else "more"
    return f"{CUT_OFF}Options(time_limit={limit:g}): a faster plan may be found with {more}"


SHOWN = 6
"""Lines of the user's program that a remark names."""


@dataclass
class RecomputedLine:
    """The recomputation of one line of the user's program.

    Arguments:
      tensors: those that are not kept.
      ops: how many run again.
      freed_bytes: on one device.
      seconds: of the ops.
    """

    tensors: int = 0
    ops: int = 0
    freed_bytes: float = 0.0
    seconds: float = 0.0


def recomputed_lines(
    candidates: Candidates, chosen: ChosenSignatures, physical: Physical, network: Network
) -> dict[str, RecomputedLine]:
    """The recomputation by lines of the user's program, those first that free most.

    Arguments:
      candidates: of the program as it is.
      physical: the program with the ops that run again.
    """
    graph, lives = candidates.graph, {life.value for life in candidates.lives}
    copies = op_count(graph)
    makers, takes = graph.producers(), Evaluator(physical, network)
    steps = {s.node.id: s for s in physical.steps if isinstance(s, Compute)}
    found: dict[str, RecomputedLine] = defaultdict(RecomputedLine)
    for v in chosen.recomputed:
        node, value = makers[v], graph.values[v]
        again, line = steps.get(copies + node.id), found[str(node.source)]
        if again is None:
            continue
        line.ops += 1
        # What has no early use has moved: it is made once.
        line.seconds += takes.seconds_of(again) if node.id in steps else 0.0
        if v in lives:
            kept = chosen.strategies[node.id].results[0]
            line.tensors += 1
            line.freed_bytes += local_bytes(value.shape, value.dtype, kept, physical.placement.shape)
    return dict(sorted(found.items(), key=lambda x: -x[1].freed_bytes))


def recomputed_notes(
    candidates: Candidates, chosen: ChosenSignatures, physical: Physical, network: Network
) -> tuple[str, ...]:
    """Remarks on recomputation; none if there is none, or only of ops that are no kernels (a transpose)."""
    lines = recomputed_lines(candidates, chosen, physical, network)
    tensors, ops = sum(x.tensors for x in lines.values()), sum(x.ops for x in lines.values())
    if not tensors:
        return ()
    freed, taken = sum(x.freed_bytes for x in lines.values()), sum(x.seconds for x in lines.values())
    head = (
        f"{'1 tensor is' if tensors == 1 else f'{tensors} tensors are'} recomputed for later uses instead of "
        f"being kept, since memory is short: {ops_text(ops)} again, {seconds_text(taken)}, and "
        f"{bytes_text(freed)} per device need not be kept"
    )
    large = [(at, x) for at, x in lines.items() if x.freed_bytes][:SHOWN]
    each = (
        f"{at}: {ops_text(x.ops)} again, which frees {bytes_text(x.freed_bytes)} for "
        f"{seconds_text(x.seconds)}"
        for at, x in large
    )
    return head, *each


def ops_text(count: int) -> str:
    """A number of ops with its verb: "1 op runs", "3 ops run"."""
    return "1 op runs" if count == 1 else f"{count} ops run"


MOST = 0.9
"""The share of the computing time from which the work counts as done everywhere."""


def everywhere_notes(
    physical: Physical, asked: Sequence[NdSbp | None], paths: Sequence[str], network: Network
) -> list[str]:
    """A remark for each placement axis whose devices all do the same although arguments are split along it.

    Weights that are gathered where they are used, as in ZeRO-3, are no such case: another argument splits the
    work.

    Arguments:
      asked: per argument, the user's signature, or None.
      paths: the names of the arguments.
    """
    given = {
        x: (path, nd)
        for x, path, nd in zip(physical.graph.inputs, paths, asked, strict=False)
        if nd is not None and not path.startswith("from ")
    }
    gathered = {s.value: s.move for s, _ in physical.walk() if isinstance(s, Box) and s.value in given}
    notes = []
    for axis, size in enumerate(physical.placement.shape):
        named = [x for x, move in gathered.items() if size > 1 and _gathers(given[x][1], move, axis)]
        heaviest = _done_everywhere(physical, axis, network) if named else None
        if heaviest is not None:
            args = ", ".join(f"{given[x][0]} {format_sbp(given[x][1])}" for x in named)
            notes.append(
                f"{args}: gathered whole over {physical.placement.axes[axis]!r}, as that is cheaper by the "
                f"estimate than to split the work, so each of the {size} devices does all of it; to insist, "
                f"annotate an activation, such as what {heaviest.op} at {heaviest.source} makes"
            )
    return notes


def _gathers(asked: NdSbp, move: Move, axis: int) -> bool:
    """Whether a move gathers what the user split along an axis."""
    return isinstance(asked[axis], Split) and isinstance(move.before[axis], Split) and move.after[axis] == B


def _done_everywhere(physical: Physical, axis: int, network: Network) -> Node | None:
    """The op that takes longest, if nearly all work is repeated on all devices of an axis."""
    graph, takes, total, same = physical.graph, Evaluator(physical, network), 0.0, 0.0
    most, heaviest = -1.0, None
    for how in executions(physical.steps):
        step = how.step
        if not isinstance(step, Compute) or not step.node.outputs:
            continue
        # Where time costs nothing, sizes say where the work is.
        size = sum(prod(graph.values[v].shape) for v in step.node.outputs)
        work = how.assumed_count * (takes.seconds_of(step) + 1e-18 * size)
        total += work
        lying = [*step.strategy.operands, *step.strategy.results]
        if all(nd[axis] == B for nd in lying):
            same += work
            if work > most and any(not isinstance(x, Const) for x in step.node.inputs):
                most, heaviest = work, step.node
    return heaviest if total and same >= MOST * total else None
