"""Annotations: what the user fixed, checked and brought into the graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from sbp.annotation import SCOPE, Pin, annotate_p
from sbp.errors import Problem
from sbp.layout import at_rest, local_shape
from sbp.passes.boxing import Boxings
from sbp.passes.graph import Const, Graph, Node, Operand, Source, Value, numbered
from sbp.passes.plan.candidates import Candidates, pin_of
from sbp.passes.plan.model import Boundary
from sbp.passes.trace import Traced
from sbp.placement import Placement
from sbp.resolve import check_fit
from sbp.signature import B, NdSbp, Partial, Split, format_sbp, splits_of


def pin_inputs(graph: Graph, pinned: Sequence[NdSbp | None], placement: Placement) -> Graph:
    """Honours an uneven signature of an argument inside: it arrives as far split as JAX can hold it."""
    values, nodes, swap = list(graph.values), [], dict[int, int]()
    for v, nd in zip(graph.inputs, pinned, strict=True):
        if nd is None or at_rest(values[v].shape, nd, placement.shape) == nd:
            continue
        values.append(replace(values[v], id=len(values)))
        swap[v] = len(values) - 1
        source = Source(scope=f"argument {values[v].name}")
        nodes.append(Node(0, annotate_p, (v,), (swap[v],), {"pin": Pin(nd, None, None)}, source))
    nodes += [replace(n, inputs=_swapped(n.inputs, swap)) for n in graph.nodes]
    return replace(
        graph,
        values=tuple(values),
        nodes=numbered(nodes),
        outputs=_swapped(graph.outputs, swap),
    )


def pin_outputs(graph: Graph, pinned: Sequence[NdSbp | None], placement: Placement) -> Graph:
    """Honours an uneven signature of a result inside; it leaves gathered as far as JAX needs."""
    values, nodes, outputs = list(graph.values), list(graph.nodes), list(graph.outputs)
    for i, (x, nd) in enumerate(zip(graph.outputs, pinned, strict=True)):
        if nd is None or isinstance(x, Const) or at_rest(values[x].shape, nd, placement.shape) == nd:
            continue
        values.append(Value(len(values), values[x].shape, values[x].dtype, values[x].name))
        source = Source(scope=f"output {i}")
        nodes.append(Node(len(nodes), annotate_p, (x,), (len(values) - 1,), {"pin": Pin(nd, None, None)}, source))
        outputs[i] = len(values) - 1
    return replace(graph, values=tuple(values), nodes=numbered(nodes), outputs=tuple(outputs))


def _swapped(operands: Iterable[Operand], swap: dict[int, int]) -> tuple[Operand, ...]:
    return tuple(x if isinstance(x, Const) else swap.get(x, x) for x in operands)


def boundary(graph: Graph, ins: Sequence[NdSbp | None], outs: Sequence[NdSbp | None], ties: Sequence[int | None], placement: Placement) -> Boundary:
    """The signatures at rest: what a `jax.Array` can hold of what the user fixed."""
    shapes = [graph.values[v].shape for v in graph.inputs]
    rest_in = tuple(None if nd is None else at_rest(s, nd, placement.shape) for s, nd in zip(shapes, ins, strict=True))
    rest_out = tuple(
        None if nd is None else at_rest(graph.operand(x).shape, nd, placement.shape)
        for x, nd in zip(graph.outputs, outs, strict=True)
    )
    return Boundary(rest_in, rest_out, tuple(ties))


def check_annotations(graph: Graph, placement: Placement) -> list[Problem]:
    """What is wrong with the annotations of a graph, all of it."""
    problems: list[Problem] = []
    producers = graph.producers()
    for node in graph.walk():
        problems.extend(_check_scope(node, placement))
        pin = pin_of(node)
        if pin is None:
            continue
        value = graph.operand(node.inputs[0])
        where = f"annotate(...) at {node.source}: {value.dtype}{list(value.shape)}"
        if pin.placement is not None and pin.placement != placement:
            problems.append(_other_placement(where, str(pin.placement), placement))
        if pin.nd is None:
            continue
        problems.extend(check_fit(pin.nd, value.shape, value.dtype, where, placement))
        problems.extend(_check_conflict(node, pin.nd, producers, where))
    return problems


def _check_scope(node: Node, placement: Placement) -> Iterator[Problem]:
    at = node.source.scope.rfind(SCOPE)
    if at < 0:
        return
    text = node.source.scope[at + len(SCOPE) :].split("/")[0].rstrip(")")
    ranks = ",".join(map(str, placement.ranks))
    if text != f"{placement.kind}[{ranks}]{'x'.join(map(str, placement.shape))}":
        yield _other_placement(f"{node.op} at {node.source}, inside sbp.on(...)", text, placement)


def _other_placement(where: str, got: str, placement: Placement) -> Problem:
    return Problem(
        "annotation",
        where,
        got,
        str(placement),
        "one program runs on one placement; ops on several placements would be pipeline stages",
        "leave placement= out, or compile on that placement",
    )


def _check_conflict(node: Node, nd: NdSbp, producers: dict[int, Node], where: str) -> Iterator[Problem]:
    """Two annotations of one tensor that say different things."""
    (x,) = node.inputs
    before = None if isinstance(x, Const) else producers.get(x)
    other = pin_of(before) if before is not None else None
    if before is not None and other is not None and other.nd is not None and other.nd != nd and before.source.file:
        yield Problem(
            "annotation",
            where,
            f"{format_sbp(nd)}, and {format_sbp(other.nd)} at {before.source}",
            "one signature for one tensor",
            "both annotations speak of the same tensor, with no op between them",
            "drop one; boxing between ops is inserted by itself",
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
        missing = [s for s in pin.nd if isinstance(s, Partial) and s.op not in have]
        if missing:
            maker = None if isinstance(x, Const) else producers.get(x)
            problems.append(_no_such_partial(candidates, node, maker, pin.nd, missing[0], boxings))
    return problems


def _no_such_partial(
    c: Candidates, node: Node, maker: Node | None, nd: NdSbp, missing: Partial, boxings: Boxings
) -> Problem:
    """The error for a P that no rule gives, with every alternative and its cost."""
    value = c.graph.operand(node.inputs[0])
    name = f"{maker.op} at {maker.source}" if maker is not None else f"argument {getattr(value, 'name', value)}"
    made: list[NdSbp] = []
    if maker is not None:
        k = maker.outputs.index(node.inputs[0]) if not isinstance(node.inputs[0], Const) else 0
        made = list(dict.fromkeys(s.results[k] for s in c.strategies[maker.id]))
    legal = ", ".join(format_sbp(s) for s in made[:12]) or "S(dim), B"
    sizes = [
        f"{format_sbp(s)} keeps {int(np.prod(local_shape(value.shape, s, c.placement.shape)))} of "
        f"{int(np.prod(value.shape))} elements per device"
        for s in made[:3]
        if s != (B,) * len(s)
    ]
    return Problem(
        "annotation",
        f"annotate(...) at {node.source}: {value.dtype}{list(value.shape)}, made by {name}",
        format_sbp(nd),
        legal,
        f"{name} has no signature that leaves {missing}: only a reduction over a split dim does",
        "; ".join(sizes) or "annotate the result of the reduction instead",
    )





def uneven_notes(in_sbp: Sequence[NdSbp | None], out_sbp: Sequence[NdSbp | None], traced: Traced, placement: Placement) -> list[str]:
    """A remark for each pinned tensor that JAX cannot hold split, with the padded size that would avoid it."""
    graph, notes = traced.graph, []
    for paths, shapes, sbps in (
        (traced.in_paths, [graph.values[v].shape for v in graph.inputs], in_sbp),
        (traced.out_paths, [graph.operand(x).shape for x in graph.outputs], out_sbp),
    ):
        for path, shape, nd in zip(paths, shapes, sbps, strict=False):
            if nd is None or at_rest(shape, nd, placement.shape) == nd:
                continue
            for dim in {s.dim for s in nd if isinstance(s, Split)}:
                group = int(np.prod([placement.shape[a] for a in splits_of(nd, dim)]))
                if shape[dim] % group:
                    padded = -(-shape[dim] // group) * group
                    notes.append(
                        f"{path}: dim {dim} of size {shape[dim]} does not divide by {group}: split inside, whole at rest; "
                        f"a size of {padded} would stay split"
                    )
    return notes
