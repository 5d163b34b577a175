"""Annotations: what the user fixed, checked and brought into the graph."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.annotation import OWN
from sbp.compat import core
from sbp.errors import Problem
from sbp.layout import allowed_at_rest, at_rest, rest_signatures
from sbp.notation.resolve import check_fit
from sbp.passes.boxing.paths import Boxings
from sbp.passes.plan.candidates import Candidates, pin_of
from sbp.passes.plan.cost import node_seconds
from sbp.passes.plan.model import Boundary, BoundaryCost, boxing_of
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.placement import Placement
from sbp.signature import AUTO_SPLIT, B, NdSbp, Partial, Split, format_sbp
from sbp.text.units import bytes_text, seconds_text

SHOWN = 8  # alternatives in a message


def boundary(
    graph: Graph,
    ins: Sequence[NdSbp | None],
    outs: Sequence[NdSbp | None],
    ties: Sequence[int | None],
    placement: Placement,
    costs: tuple[tuple[BoundaryCost | None, ...], tuple[BoundaryCost | None, ...]] = ((), ()),
) -> Boundary:
    """The signatures at rest: what a `jax.Array` can hold of what the user fixed.

    Arguments:
      costs: of arguments and of results, what they take beyond the program.
    """

    def rest(x: Operand, nd: NdSbp | None) -> NdSbp | None:
        value = graph.operand(x)
        if nd is None:
            return None
        held = _without_empty(value.shape, at_rest(value.shape, nd, placement.shape))
        asked = tuple(w if w == AUTO_SPLIT else s for w, s in zip(nd, held, strict=True))
        legal = allowed_at_rest(asked, value.shape, value.dtype, placement)
        return asked if len(legal) > 1 else legal[0]

    at_rest_in, at_rest_out = tuple(map(rest, graph.inputs, ins)), tuple(map(rest, graph.outputs, outs))
    return Boundary(at_rest_in, at_rest_out, tuple(ties), *costs)


def _without_empty(shape: Sequence[int], nd: NdSbp) -> NdSbp:
    """The same without splits of dims that have nothing to split: sizes 0 and 1."""
    return tuple(B if isinstance(s, Split) and shape[s.dim] <= 1 else s for s in nd)


def check_annotations(graph: Graph, placement: Placement) -> list[Problem]:
    """What is wrong with the annotations of a graph, all of it."""
    problems = list(_check_scopes(graph, placement))
    producers = graph.producers()
    for node in graph.walk():
        problems.extend(_check_foreign(graph, node, placement))
        pin = pin_of(node)
        if pin is None:
            continue
        value = graph.operand(node.inputs[0])
        tensor = f"{value.dtype}{list(value.shape)}"
        backward = node.role.direction == "backward"  # then it is what `grad=` asked of the cotangent
        where = f"{pin.words}(...{', grad=...' if backward else ''}) at {node.source}: {tensor}"
        if pin.placement is not None and pin.placement != placement:
            problems.append(_other_placement(where, str(pin.placement), placement))
            continue
        if pin.grad is not None:
            gradient = f"annotate(..., grad=...) at {node.source}: {tensor}"
            problems.extend(check_fit(pin.grad, value.shape, value.dtype, gradient, placement))
        if pin.nd is not None:
            misfits = list(check_fit(pin.nd, value.shape, value.dtype, where, placement))
            problems.extend(misfits or _check_conflict(node, pin.nd, producers, where))
    return list(dict.fromkeys(problems))


def _check_scopes(graph: Graph, placement: Placement) -> Iterator[Problem]:
    """Ops that belong to other placements: one problem for each of those."""
    found: dict[Placement, list[Node]] = {}
    for node in graph.walk():
        there = node.role.place
        if there is not None:
            found.setdefault(there, []).append(node)
    for there, nodes in found.items():
        if there.ranks != placement.ranks or there.shape != placement.shape or there.kind != placement.kind:
            more = f" and {len(nodes) - 1} more ops" if len(nodes) > 1 else ""
            where = f"{nodes[0].op} at {nodes[0].source}{more}, inside sbp.on(...)"
            yield _other_placement(where, str(there), placement)


def _check_foreign(graph: Graph, node: Node, placement: Placement) -> Iterator[Problem]:
    """Ops by which JAX itself places tensors on devices: a single-device program has none."""
    if node.op == "io_callback":
        yield Problem(
            "annotation",
            f"io_callback at {node.source}",
            "a callback that changes the host's state and returns values",
            "jax.debug.callback (runs once), jax.pure_callback (runs on each device)",
            "it would run once per device, and each device would get an answer of its own",
            "call it outside the program, and pass its result as an argument",
        )
    elif core.is_ordered(node.params) and placement.size > 1:
        yield Problem(
            "annotation",
            f"{node.op} at {node.source}",
            "ordered=True",
            "ordered=False, or a placement of one device",
            f"JAX keeps the order of callbacks on one device only, and {placement} has {placement.size}",
            "leave ordered=True out: the callback still runs once per step, with the whole value",
        )


def _other_placement(where: str, got: str, placement: Placement) -> Problem:
    return Problem(
        "annotation",
        where,
        got,
        str(placement),
        "all ops of this program run on one placement; stages are marked by sbp.on of several",
        "leave placement= and sbp.on out, or compile on that placement",
    )


def _check_conflict(node: Node, nd: NdSbp, producers: dict[int, Node], where: str) -> Iterator[Problem]:
    """Two annotations of one tensor that say different things."""
    (x,) = node.inputs
    before = None if isinstance(x, Const) else producers.get(x)
    if before is None or not before.source.file:
        return
    other, pin = pin_of(before), pin_of(node)
    # Two of JAX's own words one behind the other say that something is sent there.
    own = pin is not None and other is not None and pin.words == other.words == OWN
    if own and other is not None and other.nd is not None and other.nd != nd:
        yield Problem(
            "annotation",
            where,
            f"{format_sbp(nd)}, and {format_sbp(other.nd)} at {before.source}",
            "one signature for one tensor",
            "both annotations are on the same tensor, with no op between them",
            "drop one; the compiler inserts boxing between ops",
        )


def check_partials(candidates: Candidates, boxings: Boxings) -> list[Problem]:
    """Annotations that ask for a sum (maximum) where the op that makes the tensor cannot leave one."""
    graph, problems = candidates.graph, []
    producers = graph.producers()
    for node in graph.walk():
        pin = pin_of(node)
        if pin is None or pin.nd is None:
            continue
        (x,) = node.inputs
        have = frozenset() if isinstance(x, Const) else candidates.partials[x]
        asked = [s for s in pin.nd if isinstance(s, Partial)]
        missing = [s for s in asked if s.op not in have]
        maker = None if isinstance(x, Const) else producers.get(x)
        if missing or (asked and maker is not None and not _reaches(candidates, node, maker, boxings)):
            options = _alternatives(candidates, x, maker, boxings)
            problems.append(_no_such_partial(graph, node, maker, pin.nd, missing, options))
    return problems


def _reaches(c: Candidates, node: Node, maker: Node, boxings: Boxings) -> bool:
    """Whether some signature of `maker` becomes the annotated one: a dim may be too short for two sums."""
    (x,), pin = node.inputs, pin_of(node)
    strategies = c.strategies.get(maker.id)
    if not strategies or isinstance(x, Const) or pin is None or pin.nd is None:
        return True
    boxing = boxing_of(boxings, c, c.graph.values[x].shape, c.graph.values[x].dtype, x)
    made, wanted = maker.outputs.index(x), boxing.index[pin.nd]
    return any(
        math.isfinite(boxing.strict_seconds[boxing.index[s.results[made]], wanted]) for s in strategies
    )


@dataclass(frozen=True, slots=True)
class _Alternative:
    """A signature that a tensor can have where it is made: the op's time, and the cost to make it whole."""

    nd: NdSbp
    op_seconds: float
    box_seconds: float
    wire_bytes: float

    def __str__(self) -> str:
        made = f"{format_sbp(self.nd)} takes {seconds_text(self.op_seconds)}"
        if all(s == B for s in self.nd):
            return made
        cost = f"{seconds_text(self.box_seconds)} and {bytes_text(self.wire_bytes)} sent"
        return f"{made}, then {cost} to make it whole"


def _alternatives(c: Candidates, x: Operand, maker: Node | None, boxings: Boxings) -> list[_Alternative]:
    """What a tensor can lie as where it is made, the cheapest first."""
    value, network = c.graph.operand(x), boxings.network
    whole = (B,) * c.placement.ndim
    seconds: dict[NdSbp, float] = {}
    strategies = c.strategies.get(maker.id, ()) if maker is not None else ()
    for s in strategies:
        assert maker is not None and not isinstance(x, Const)
        nd = s.results[maker.outputs.index(x)]
        op = node_seconds(c.graph, maker, s, network)
        seconds[nd] = min(op, seconds.get(nd, op))
    if not strategies:
        seconds = dict.fromkeys(rest_signatures(value.shape, value.dtype, c.placement), 0.0)
    out = []
    for nd, op in seconds.items():
        own = frozenset(s.op for s in nd if isinstance(s, Partial))
        dims = tuple(sorted({s.dim for s in nd if isinstance(s, Split)}))
        path = boxings.of(value.shape, value.dtype, own, dims).path(nd, whole)
        box = sum(network.seconds(m, value.shape, value.dtype) for m in path)
        wire = sum(network.wire_bytes(m, value.shape, value.dtype) for m in path)
        out.append(_Alternative(nd, op, box, wire))
    return sorted(out, key=lambda a: a.op_seconds + a.box_seconds)


def _no_such_partial(
    graph: Graph,
    node: Node,
    maker: Node | None,
    nd: NdSbp,
    missing: Sequence[Partial],
    options: Sequence[_Alternative],
) -> Problem:
    """The error for a P that no rule gives, with every alternative and its cost; none is missing if each
    could be alone."""
    value, pin = graph.operand(node.inputs[0]), pin_of(node)
    words = "annotate" if pin is None else pin.words
    partial = next(s for s in (*missing, *nd) if isinstance(s, Partial))
    if maker is None:
        made, why = f"argument {getattr(value, 'name', value)}", "it arrives as whole values"
    else:
        made = f"made by {maker.op} at {maker.source}"
        why = f"{maker.op} has no signature that leaves {partial if missing else format_sbp(nd)}"
    shown = [str(a) for a in options[:SHOWN]]
    if len(options) > SHOWN:
        shown.append(f"and {len(options) - SHOWN} more, each slower")
    return Problem(
        "annotation",
        f"{words}(...) at {node.source}: {value.dtype}{list(value.shape)}, {made}",
        format_sbp(nd),
        "; ".join(shown),
        f"{why}: only a reduction over a split dim makes a {partial}",
        f"{format_sbp(options[0].nd)}, or annotate the result of the reduction itself",
    )
