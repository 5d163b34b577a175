"""Cuts a model into stages where it balances, and gives its ops the scopes of the placements.

The forward pass is cut in the order of the trace, so every value goes forward. JAX's backward pass runs in
the opposite order. The values that a backward op reads from the forward pass bound the position of the
forward op that it belongs to; within these bounds the backward pass is cut where the fewest bytes cross.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sbp.compat import core
from sbp.errors import AnnotationError, Problem
from sbp.hardware.catalogue import Hardware
from sbp.passes.boxing.links import Network
from sbp.passes.physical.kernel_merges import merge_ops
from sbp.passes.pipeline.op_placement import loop_of, reads_of
from sbp.passes.pipeline.sums import sums_of
from sbp.passes.plan.candidates import Strategy
from sbp.passes.plan.cost import node_seconds
from sbp.passes.plan.traffic import OpTraffic
from sbp.passes.program.control import assumed_trips
from sbp.passes.program.graph import Graph, Node
from sbp.passes.program.role import SUMS
from sbp.passes.program.views import op_of
from sbp.placement import Placement
from sbp.rules.entry import all_broadcast

Vector = NDArray[np.float64]
STATE = 4.0
"""Bytes of a weight with its gradient and the state of an optimizer, relative to the weight."""
THRESHOLDS = 96
WINDOWS = 256


@dataclass(frozen=True)
class Line:
    """The loop's body as a line of forward ops.

    Arguments:
      forward: their ids, in order.
      backward: the ids of backward ops, in order.
      least, most: per backward op, bounds of the position of its forward op.
      backward_bytes: bytes that a cut of the backward pass before each op sends.
      seconds: per position, of the forward op and its backward ops, on one device.
      crossing_bytes: per position, bytes that a cut before it sends each way.
      weights, residual_bytes: per position, bytes of weights that are first used there, and of residuals for
        the backward pass.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    least: NDArray[np.int64]
    most: NDArray[np.int64]
    backward_bytes: Vector
    seconds: Vector
    crossing_bytes: Vector
    weights: Vector
    residual_bytes: Vector


def cut_model(
    graph: Graph,
    placements: Sequence[Placement],
    hardware: Hardware,
    memory_limit_bytes: float | None = None,
    layers: Sequence[int] = (),
) -> Graph:
    """The graph with every op of the loop's body on the placement of a stage.

    Arguments:
      placements: per stage, in order; one may occur several times.
      layers: of a scan over layers that was cut already, how many each stage has; () of another model.

    Raises:
      AnnotationError: for a program without micro-batches, or with fewer ops than stages.
    """
    loop = loop_of(graph)
    if loop is None:
        raise AnnotationError(_uncut(graph, "a program without sbp.microbatch", "sbp.microbatch(fn, n, ...)"))
    line = line_of(graph, loop, hardware)
    if len(line.forward) < len(placements):
        raise AnnotationError(
            _uncut(graph, f"{len(line.forward)} ops, {len(placements)} stages", "fewer stages")
        )
    microbatches = int(loop.params["length"])
    cuts = begins_of_scans(loop, line, layers) if layers else ()
    cuts = cuts or balance(line, placements, hardware, microbatches, memory_limit_bytes)
    return on_stages(graph, loop, line, cuts, placements)


def line_of(graph: Graph, loop: Node, hardware: Hardware) -> Line:
    """The ops of a loop's body as a line."""
    (body,) = loop.bodies
    n_const, n_carry = core.scan_counts(loop.params, len(loop.inputs))
    batch = {v for v in body.inputs[n_const + n_carry :] if not core.is_key(graph.values[v].dtype)}
    batch -= {body.inputs[n_const + n_carry]} if _is_counter(graph, loop, n_const + n_carry) else set()
    main: set[int] = set(batch)  # values that depend on the batch
    undoing: set[int] = set()  # values of the backward pass
    forward: list[Node] = []
    backward: list[Node] = []
    carried = body.inputs[n_const : n_const + n_carry]
    added = {n.id for s in sums_of(body, carried) for n in s.additions}
    for node in body.nodes:
        reads = list(reads_of(node))
        if node.id in added or not main.intersection(reads):
            continue
        main.update(node.outputs)
        if node.role.direction == "backward" or undoing.intersection(reads):
            undoing.update(node.outputs)
            backward.append(node)
        else:
            forward.append(node)
    at = {v: i for i, n in enumerate(forward) for v in n.outputs}
    roots = _first_uses(body.nodes, forward, main)
    least, most = _bounds(forward, backward, at, roots)
    network, traffic = Network(Placement("cpu", (0,), (1,), ("x",)), hardware), merge_ops(graph).traffic
    seconds = np.zeros(len(forward))
    for i, n in enumerate(forward):
        seconds[i] += _seconds(graph, n, network, traffic)
    for n, i in zip(backward, least, strict=True):
        seconds[i] += _seconds(graph, n, network, traffic)
    crossing, kept = _bytes_by_position(graph, forward, backward, at)
    weights = np.zeros(len(forward))
    consts = set(body.inputs[:n_const])
    for v in consts & set(roots):
        weights[roots[v]] += _bytes(graph, v)
    returning = _crossing(graph, backward)
    ids = tuple(n.id for n in forward), tuple(n.id for n in backward)
    return Line(*ids, least, most, returning, seconds, crossing, weights, kept)


def begins_of_scans(loop: Node, line: Line, layers: Sequence[int]) -> tuple[int, ...]:
    """The first ops of stages that are consecutive scans over so many layers; () if there are none."""
    nodes = {n.id: n for n in loop.bodies[0].nodes}
    scans = [i for i, k in enumerate(line.forward) if nodes[k].op == "scan"]
    for first in range(len(scans) - len(layers) + 1):
        some = scans[first : first + len(layers)]
        chain = [nodes[line.forward[i]] for i in some]
        linked = all(not set(a.outputs).isdisjoint(b.inputs) for a, b in pairwise(chain))
        if linked and [n.params["length"] for n in chain] == list(layers):
            return (0, *some[1:])
    return ()


def _is_counter(graph: Graph, loop: Node, i: int) -> bool:
    """Whether a scanned operand counts the micro-batches."""
    value = graph.values[loop.bodies[0].inputs[i]] if i < len(loop.inputs) else None
    return value is not None and not value.shape and np.issubdtype(value.dtype, np.integer)


def _first_uses(nodes: Sequence[Node], forward: Sequence[Node], main: set[int]) -> dict[int, int]:
    """Per value that does not depend on the batch, the first forward op that it is used for."""
    found: dict[int, int] = {}
    for i, n in enumerate(forward):
        for x in reads_of(n):
            if x not in main:
                found.setdefault(x, i)
    for n in reversed(nodes):
        uses = [found[v] for v in n.outputs if v in found]
        for x in reads_of(n) if uses else ():
            if x not in main:
                found[x] = min(found.get(x, min(uses)), *uses)
    return found


def _bounds(
    forward: Sequence[Node], backward: Sequence[Node], at: Mapping[int, int], roots: Mapping[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per backward op, the bounds of the position of its forward op.

    It comes after the values that it reads, and not after their last use; and the order is reversed.
    """
    last = _last_uses(forward, at)
    end = len(forward) - 1
    least = [max((at.get(x, roots.get(x, 0)) for x in reads_of(n)), default=0) for n in backward]
    most = [min((last[x] for x in reads_of(n) if x in at), default=end) for n in backward]
    low = np.maximum.accumulate(np.array(least, np.int64)[::-1])[::-1]
    return low, np.maximum(low, np.minimum.accumulate(np.array(most, np.int64)))


def _last_uses(nodes: Sequence[Node], at: Mapping[int, int]) -> dict[int, int]:
    """Per value that ops in order make, the position of its last reader, or its own if there is none."""
    last = dict(at)
    for i, n in enumerate(nodes):
        last.update({x: i for x in reads_of(n) if x in at})
    return last


def _crossing(graph: Graph, nodes: Sequence[Node]) -> Vector:
    """Bytes that are made before and read after a cut before each position, and after the last."""
    at = {v: i for i, n in enumerate(nodes) for v in n.outputs}
    out = np.zeros(len(nodes) + 1)
    for v, last in _last_uses(nodes, at).items():
        out[at[v] + 1 : last + 1] += _bytes(graph, v)
    return out


def _bytes_by_position(
    graph: Graph, forward: Sequence[Node], backward: Sequence[Node], at: Mapping[int, int]
) -> tuple[Vector, Vector]:
    """Per position, the bytes that cross a cut before it, and those kept for the backward pass."""
    kept = np.zeros(len(forward))
    for v in {x for n in backward for x in reads_of(n) if x in at}:
        kept[at[v]] += _bytes(graph, v)
    return _crossing(graph, forward), kept


def balance(
    line: Line,
    placements: Sequence[Placement],
    hardware: Hardware,
    microbatches: int,
    memory_limit_bytes: float | None,
) -> tuple[int, ...]:
    """The first ops of stages for the least time of a pipeline: (m - 1) x its slowest stage, and all once.

    For every bound on the slowest stage, dynamic programming finds the cuts with the least total time. Cuts
    are candidates where the fewest bytes cross, in windows of equal work.
    """
    at, p, size = _places(line, len(placements)), len(placements), placements[0].size
    count = len(at) - 1
    near = [hardware.link_between(a.ranks, b.ranks) for a, b in pairwise(placements)]
    link = min(near, key=lambda x: x.bytes_per_second, default=hardware.links[0])
    crossing = line.crossing_bytes[at]
    # Every cut has the same latency; and what a stage sends can be on its way while it computes.
    sends = 2 * crossing / size / link.bytes_per_second
    sends[0] = sends[count] = 0.0
    work = np.concatenate([[0.0], np.cumsum(line.seconds)])[at] / size
    stage = work[None, :] - work[:, None] + sends[: count + 1, None]  # [begin, end]
    stage[np.tril_indices(count + 1)] = np.inf
    if memory_limit_bytes is not None:
        weights = np.concatenate([[0.0], np.cumsum(line.weights)])[at] * STATE / size
        kept = np.concatenate([[0.0], np.cumsum(line.residual_bytes)])[at] / size * min(p, microbatches)
        need = (weights + kept)[None, :] - (weights + kept)[:, None]
        stage[need > memory_limit_bytes] = np.inf
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    floor, whole = float(work[-1] / p), float(work[-1] + sends.max() * p)
    for bound in np.geomspace(max(floor, 1e-30), max(whole, 1e-30), THRESHOLDS):
        found = _cheapest(np.where(stage <= bound, stage, np.inf), p)
        if found is not None:
            total, cuts = found
            slowest = max(float(stage[a, b]) for a, b in zip(cuts, [*cuts[1:], count], strict=True))
            best = min(best, ((microbatches - 1) * slowest + total, cuts))
    if not best[1]:
        raise AnnotationError(
            Problem(
                "annotation",
                "PipelineOptions(stages=...)",
                f"{p} stages under a memory limit of {memory_limit_bytes:.3g} bytes per device",
                "a limit that every stage can keep",
                "however the model is cut, some stage needs more",
                "more stages, more devices per stage, or a higher limit",
            )
        )
    return tuple(int(at[i]) for i in best[1])


def _places(line: Line, stages: int) -> NDArray[np.int64]:
    """Candidates for the first op of a stage, and the end: where least crosses, per window of equal work."""
    count = len(line.forward)
    if count <= max(WINDOWS, stages):
        return np.arange(count + 1)
    work = np.cumsum(line.seconds) + np.linspace(0, 1e-30, count)
    window = np.minimum((work / work[-1] * WINDOWS).astype(np.int64), WINDOWS - 1)
    found = [0, count]
    for w in np.unique(window):
        (inside,) = np.nonzero(window == w)
        found.append(int(inside[np.argmin(line.crossing_bytes[inside])]))
    return np.unique(np.array(found, np.int64))


def _cheapest(stage: Vector, p: int) -> tuple[float, tuple[int, ...]] | None:
    """The least sum over `p` stages one after the other, and their first ops."""
    count = stage.shape[0] - 1
    cost = stage[0].copy()
    back: list[NDArray[np.int64]] = []
    for _ in range(p - 1):
        total = cost[:, None] + stage
        back.append(np.argmin(total, axis=0))
        cost = total[back[-1], np.arange(count + 1)]
    if not np.isfinite(cost[count]):
        return None
    cuts, end = list[int](), count
    for step in reversed(back):
        end = int(step[end])
        cuts.append(end)
    return float(cost[count]), (0, *reversed(cuts))


def on_stages(
    graph: Graph, loop: Node, line: Line, cuts: Sequence[int], placements: Sequence[Placement]
) -> Graph:
    """The graph with the ops of each stage on its placement."""
    stage = np.searchsorted(np.asarray(cuts), np.arange(len(line.forward)), side="right") - 1
    places = {i: placements[stage[k]] for k, i in enumerate(line.forward)}
    for i, k in zip(line.backward, _stages_back(line, cuts), strict=True):
        places[i] = placements[k]

    def placed(n: Node) -> Node:
        return replace(n, role=n.role.on(places[n.id])) if n.id in places and n.op not in SUMS else n

    (body,) = loop.bodies
    whole = replace(loop, bodies=(replace(body, nodes=tuple(map(placed, body.nodes))),))
    return replace(graph, nodes=tuple(whole if n is loop else n for n in graph.nodes))


def _stages_back(line: Line, cuts: Sequence[int]) -> list[int]:
    """The stage of every backward op, in order."""
    count, begins = len(line.backward), [0]
    for cut in reversed(cuts[1:]):
        # All that surely undoes the later stage comes before, all that surely undoes the earlier one after.
        first = max(begins[-1], int(np.searchsorted(-line.least, -cut, side="right")))
        last = max(first, int(np.searchsorted(-line.most, -cut, side="right")))
        begins.append(first + int(np.argmin(line.backward_bytes[first : last + 1])))
    ends = [*begins[1:], count]
    return [
        s
        for s, (a, b) in zip(range(len(cuts) - 1, -1, -1), zip(begins, ends, strict=True), strict=True)
        for _ in range(a, b)
    ]


def _seconds(graph: Graph, node: Node, network: Network, traffic: Mapping[int, OpTraffic]) -> float:
    """The time of an op on one device."""
    if node.bodies:
        inner = sum(_seconds(graph, n, network, traffic) for body in node.bodies for n in body.nodes)
        return inner * assumed_trips(node)
    ins, outs = [graph.operand(x).shape for x in node.inputs], [graph.values[v].shape for v in node.outputs]
    row = all_broadcast(op_of(graph, node, ins, outs, 1))
    each = tuple(tuple((s,) for s in side) for side in (row.operands, row.results))
    strategy = Strategy(each[0], each[1], (False,) * len(node.inputs), (row,))
    return node_seconds(graph, node, strategy, network, traffic.get(node.id))


def _bytes(graph: Graph, v: int) -> float:
    value = graph.values[v]
    return float(math.prod(value.shape) * core.itemsize(value.dtype))


def _uncut(graph: Graph, got: str, fix: str) -> Problem:
    line = str(graph.nodes[0].source) if graph.nodes else "a program without ops"
    return Problem(
        "annotation",
        f"PipelineOptions(stages=...), {line}",
        got,
        "a loop over micro-batches with an op for every stage",
        "stages are cut out of the loop over micro-batches",
        fix,
    )
