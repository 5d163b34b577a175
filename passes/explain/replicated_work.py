"""Finds work that all devices of an axis repeat although an argument is split, and how to avoid it."""

from collections.abc import Sequence
from math import prod

from sbp.passes.boxing.links import Network
from sbp.passes.boxing.moves import Move
from sbp.passes.physical.evaluate import Evaluator, executed
from sbp.passes.physical.program import Box, Compute, Physical
from sbp.passes.program.graph import Const, Node
from sbp.signature import B, NdSbp, Split, format_sbp

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
    for how in executed(physical.steps):
        step = how.step
        if not isinstance(step, Compute) or not step.node.outputs:
            continue
        # Where time costs nothing, sizes say where the work is.
        size = sum(prod(graph.values[v].shape) for v in step.node.outputs)
        work = how.assumed * (takes.seconds_of(step) + 1e-18 * size)
        total += work
        lying = [*step.strategy.operands, *step.strategy.results]
        if all(nd[axis] == B for nd in lying):
            same += work
            if work > most and any(not isinstance(x, Const) for x in step.node.inputs):
                most, heaviest = work, step.node
    return heaviest if total and same >= MOST * total else None
