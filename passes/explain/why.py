"""Why a collective is there, at length: its reason, and what the ops beside it could do instead."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.explain.collectives import InnerCollective, communication_steps
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.explain.words import kind_text, over_text, tensor_text
from sbp.passes.physical.evaluate import executions
from sbp.passes.physical.program import Compute, Flow, Physical
from sbp.passes.plan.candidates import Candidates, Strategy, enumerate_candidates
from sbp.passes.plan.cost import node_seconds
from sbp.passes.plan.model import boxing_of
from sbp.passes.program.graph import Const, Node
from sbp.passes.program.names import without_indices
from sbp.signature import NdSbp, Partial, format_sbp
from sbp.text.units import bytes_text, seconds_text

SHOWN = 4


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another signature of one op.

    Arguments:
      strategy: the signature.
      seconds: how much slower one execution would be with it and all else as it is.
    """

    strategy: Strategy
    seconds: float


@dataclass(frozen=True)
class Alternatives:
    """What-ifs on one physical program: one op changes its signature, everything else keeps its own."""

    plan: PlanData
    physical: Physical

    @cached_property
    def _candidates(self) -> Candidates:
        p = self.physical
        return enumerate_candidates(p.graph, p.placement, dict(zip(p.graph.inputs, p.inputs, strict=True)))

    @cached_property
    def _boxings(self) -> Boxings:
        return Boxings(Network(self.physical.placement, self.plan.hardware))

    @cached_property
    def _flow(self) -> Flow:
        return Flow(self.physical)

    def of(self, node: Node, chosen: Strategy) -> list[Alternative]:
        """The other signatures of an op, the cheapest first."""
        now = self._seconds(node, chosen)
        others = [s for s in self._candidates.strategies[node.id] if s != chosen]
        found = [Alternative(s, self._seconds(node, s) - now) for s in others]
        return sorted((a for a in found if a.seconds < float("inf")), key=lambda a: a.seconds)

    def _seconds(self, node: Node, strategy: Strategy) -> float:
        """The op itself, and the moves of what it reads and makes."""
        p = self.physical
        seconds = node_seconds(p.graph, node, strategy, self._boxings.network, p.traffic.get(node.id))
        for x, nd, strict in zip(node.inputs, strategy.operands, strategy.strict, strict=True):
            if not isinstance(x, Const):
                others = {n for user, n in self._flow.readers[x] if user != node.id and not _sums(n)}
                seconds += min(
                    self._move(x, have, nd, strict) for have in {self._flow.result_sbp[x], *others}
                )
        for v, nd in zip(node.outputs, strategy.results, strict=True):
            seconds += sum(
                self._move(v, nd, wanted, False) for wanted in {n for _, n in self._flow.readers.get(v, ())}
            )
        return seconds

    def _move(self, v: int, before: NdSbp, after: NdSbp, strict: bool) -> float:
        value = self.physical.graph.values[v]
        boxing = boxing_of(self._boxings, self._candidates, value.shape, value.dtype, v)
        table = boxing.strict_seconds if strict else boxing.seconds
        if before not in boxing.index or after not in boxing.index:
            return float("inf")
        return float(table[boxing.index[before], boxing.index[after]])


def _sums(nd: NdSbp) -> bool:
    """A sum may have been made by filling with zeros, so no other op can rely on it."""
    return any(isinstance(s, Partial) for s in nd)


def select(plan: PlanData, what: str) -> list[int]:
    """The collectives that a text means: part of a source line, of a tensor's name or of the kind.

    Of equal ones (those of other layers) only the first.
    """
    wanted = what.lower().replace("-", "_")
    seen: set[object] = set()
    out = []
    for i, c in enumerate(plan.collectives):
        place = c.source.lower()
        hit = (
            place == what.lower()
            or place.endswith(f":{what}")
            or wanted in c.kind
            or what in (c.tensor, place.split(":")[0])
        )
        key = (
            c.kind,
            c.shape,
            c.before,
            c.after,
            c.source,
            without_indices(c.reason),
            without_indices(c.tensor),
        )
        if (hit or (len(what) > 3 and what in c.tensor)) and key not in seen:
            seen.add(key)
            out.append(i)
    return out


def why_text(plan: PlanData, indices: Sequence[int]) -> str:
    """Collectives at length; with their alternatives if the plan still has its program."""
    physical = plan.physical
    what_if = None if physical is None else Alternatives(plan, physical)
    return "\n\n".join("\n".join(_one(plan, i, what_if)) for i in indices)


def _one(plan: PlanData, index: int, what_if: Alternatives | None) -> list[str]:
    c = plan.collectives[index]
    lines = [
        f"{kind_text(c.kind)} of {c.tensor}, {tensor_text(c)}",
        f"  {format_sbp(c.before)} -> {format_sbp(c.after)} over {over_text(c)}, at {c.source}",
        f"  {bytes_text(c.wire_bytes)} sent per device, {seconds_text(c.seconds)}, {_share(plan, c)}"
        + (f" ({c.count} times per step)" if c.count > 1 else ""),
        f"  why: {c.reason}",
    ]
    if c.kind == "send":
        return lines
    if what_if is None:
        return [*lines, "  (a plan from a file knows no alternatives)"]
    steps = [
        (e.step, e.assumed_count) for e in executions(what_if.physical.steps) if isinstance(e.step, Compute)
    ]
    box, how = communication_steps(what_if.physical)[index]
    if isinstance(box, InnerCollective):
        return [*lines, *_alternatives("needs", box.step, how.assumed_count, what_if)]
    beside = [
        *(("makes", *s) for s in steps if box.value in s[0].node.outputs),
        *(("takes", *s) for s in steps if s[0].node.id == box.user),
    ]
    for verb, step, times in beside:
        lines += _alternatives(verb, step, times, what_if)
    if box.user < 0:
        lines.append("  it is a result: another out_sbp may avoid it")
    return lines


def _share(plan: PlanData, c: Collective) -> str:
    return f"{100 * c.seconds / plan.seconds:.1f} % of the step" if plan.seconds > 0 else "0 % of the step"


def _alternatives(verb: str, step: Compute, times: int, what_if: Alternatives) -> list[str]:
    """What the op beside a collective could do instead."""
    found = what_if.of(step.node, step.strategy)
    chosen = f"  {step.node.op} at {step.node.source} {verb} it as {_signature(step.strategy)}"
    if not found:
        return [f"{chosen}; it has no other signature"]
    lines = [f"{chosen}; with all else as it is, instead:"]
    for a in found[:SHOWN]:
        sign = "+" if a.seconds >= 0 else "-"
        lines.append(f"    {sign}{seconds_text(times * abs(a.seconds)):<9} {_signature(a.strategy)}")
    if len(found) > SHOWN:
        lines.append(f"    and {len(found) - SHOWN} more, each slower than these")
    return lines


def _signature(s: Strategy) -> str:
    """An op's signature: operands -> results."""
    return f"{', '.join(map(format_sbp, s.operands))} -> {', '.join(map(format_sbp, s.results))}"
