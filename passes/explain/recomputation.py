"""The recomputation of a plan: ops that run again, tensors that are not kept, and the time it costs."""

from collections import defaultdict
from dataclasses import dataclass

from sbp.passes.boxing.links import Network
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Compute, Physical
from sbp.passes.plan.candidates import Candidates
from sbp.passes.plan.clusters import op_count
from sbp.passes.plan.cost import local_bytes
from sbp.passes.plan.model import ChosenSignatures
from sbp.text.units import bytes_text, seconds_text

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
