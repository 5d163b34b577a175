"""What a search has found, as data that a file can hold, and back again: a signature for everything.

Ops, arguments and results are called by their positions in the graph, which are the same in every process.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax

from sbp.layout import allowed_at_rest
from sbp.passes.plan.candidates import Candidates, Strategy
from sbp.passes.plan.clusters import Cluster, RecomputedValue, op_count
from sbp.passes.plan.model import Boundary, ChosenSignatures
from sbp.passes.program.graph import Const, Graph, Node, Operand
from sbp.placement import Placement
from sbp.signature import B, NdSbp, format_sbp, parse_sbp
from sbp.version import VERSION

_ND = re.compile(r"\[[^\]]*\]")
AskedEnds: TypeAlias = tuple[NdSbp | None, ...]
RowText: TypeAlias = tuple[str, str, str]
ClusterText: TypeAlias = tuple[tuple[int, ...], NdSbp | None]
RecomputedText: TypeAlias = tuple[RowText, tuple[int, ...], NdSbp | None, tuple[ClusterText, ...]]


@dataclass(frozen=True)
class ChoiceRecord:
    """The signatures that were chosen for a program.

    Arguments:
      program: the digest of its graph (`GraphDigest.text`).
      costs: the digest of what times were estimated from: its bound is of those.
      made_by: versions of this library and of JAX.
      asked_inputs, asked_outputs: what was asked of them; None for AUTO.
      inputs, outputs: at rest, per graph input and output.
      rows: the distinct signatures of ops: name, operands and results, such as
        ("dot_general", "[S(0), B] [B, B]", "[S(0), B]").
      ops: per op that is not control flow, in the order of the graph, the number of its row.
      ports: per control-flow op, in that order, the signature inside of each of its ports.
      shares: per value with several uses, by its id, what it is boxed to first.
      clusters: per value that is boxed anew for later uses, by its id: the users of each cluster, by their
        positions among all ops (results as -1 - i; an op that runs again by its position behind all ops), and
        what the value is boxed to for them.
      recomputed: per value that is made again for its later uses, by its id: the row of the op then, those
        who use it later, what it is boxed to first, and their clusters.
      seconds, bound, cheapest_seconds: as of `ChosenSignatures`.
      notes: remarks of the search.
    """

    program: str
    costs: str
    made_by: str
    asked_inputs: AskedEnds
    asked_outputs: AskedEnds
    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]
    rows: tuple[RowText, ...]
    ops: tuple[int, ...]
    ports: tuple[tuple[NdSbp, ...], ...]
    shares: Mapping[int, NdSbp]
    seconds: float
    bound: float
    notes: tuple[str, ...] = ()
    clusters: Mapping[int, tuple[ClusterText, ...]] = field(default_factory=dict)
    cheapest_seconds: float | None = None
    recomputed: Mapping[int, RecomputedText] = field(default_factory=dict)


class NotTaken(ValueError):
    """A record that does not fit a program."""

    def __init__(self, where: str, got: str, legal: str) -> None:
        super().__init__(f"{where}: {got}")
        self.where, self.got, self.legal = where, got, legal


def versions() -> str:
    """Of this library and of JAX: with others a function may be traced, or planned, otherwise."""
    return f"sbp {VERSION}, jax {jax.__version__}"


def plain_ops(graph: Graph) -> list[Node]:
    """The ops that are not control flow, in order."""
    return [n for n in graph.walk() if not n.bodies]


def record_of(
    graph: Graph,
    chosen: ChosenSignatures,
    asked: tuple[AskedEnds, AskedEnds],
    digests: tuple[str, str],
    notes: tuple[str, ...] = (),
) -> ChoiceRecord:
    """The record of what was chosen for a graph.

    Arguments:
      asked: of arguments and of results.
      digests: of the graph and of the costs.
      notes: remarks of the search.
    """
    place = {u: i for i, u in enumerate(_user_ids(graph))}
    number: dict[RowText, int] = {}
    known: dict[tuple[str, int], int] = {}
    ops = []
    for node in plain_ops(graph):
        strategy = chosen.strategies[node.id]
        key = node.op, id(strategy)
        if key not in known:
            known[key] = number.setdefault(_row(node.op, strategy), len(number))
        ops.append(known[key])
    return ChoiceRecord(
        program=digests[0],
        costs=digests[1],
        made_by=versions(),
        asked_inputs=asked[0],
        asked_outputs=asked[1],
        inputs=chosen.inputs,
        outputs=chosen.outputs,
        rows=tuple(number),
        ops=tuple(ops),
        ports=tuple(chosen.ports[n.id] for n in graph.walk() if n.bodies),
        shares=dict(sorted(chosen.shares.items())),
        seconds=chosen.seconds,
        bound=chosen.bound,
        notes=notes,
        clusters={v: _near_texts(place, near) for v, near in sorted(chosen.clusters.items())},
        cheapest_seconds=chosen.cheapest_seconds,
        recomputed=_recomputed_texts(graph, chosen, place),
    )


def _near_texts(place: Mapping[int, int], near: Iterable[Cluster]) -> tuple[ClusterText, ...]:
    """Clusters, their users called by their positions."""
    return tuple((tuple(sorted(place.get(u, u) for u in c.users)), c.share) for c in near)


def _user_ids(graph: Graph) -> list[int]:
    """The ids of all who may use a value, by their positions: ops, and the same ops where they run again."""
    ids = [n.id for n in graph.walk()]
    count = op_count(graph)
    return [*ids, *(count + i for i in ids)]


def _clusters(ids: Sequence[int], near: Iterable[ClusterText]) -> tuple[Cluster, ...]:
    """The same with the ids of the graph at hand."""
    return tuple(Cluster(_users(ids, users), nd) for users, nd in near)


def _users(ids: Sequence[int], users: Iterable[int]) -> frozenset[int]:
    found = tuple(users)
    if any(u >= len(ids) for u in found):
        raise NotTaken("the program", "users that are not there", "those of this one")
    return frozenset(u if u < 0 else ids[u] for u in found)


def _recomputed_texts(
    graph: Graph, chosen: ChosenSignatures, place: Mapping[int, int]
) -> dict[int, RecomputedText]:
    """What is made again, by values; the op that makes each is known by its row."""
    if not chosen.recomputed:
        return {}
    makers, found = graph.producers(), {}
    for v, r in sorted(chosen.recomputed.items()):
        users, _ = _near_texts(place, [Cluster(r.users, None)])[0]
        found[v] = _row(makers[v].op, r.strategy), users, r.share, _near_texts(place, r.clusters)
    return found


def _row(op: str, s: Strategy) -> RowText:
    return op, " ".join(map(format_sbp, s.operands)), " ".join(map(format_sbp, s.results))


@dataclass
class _Reader:
    """Finds what a record says among the candidates of a graph."""

    record: ChoiceRecord
    candidates: Candidates
    found: dict[tuple[int, int], Strategy] = field(default_factory=dict)

    def strategies(self) -> Iterator[tuple[int, Strategy]]:
        ops = plain_ops(self.candidates.graph)
        if len(ops) != len(self.record.ops):
            raise NotTaken("the program", f"{len(self.record.ops)} ops", f"the {len(ops)} ops of this one")
        for node, row in zip(ops, self.record.ops, strict=True):
            listed = self.candidates.strategies[node.id]
            key = id(listed), row
            if key not in self.found:
                self.found[key] = self.strategy(node, listed, self.record.rows[row])
            yield node.id, self.found[key]

    def strategy(self, node: Node, listed: Sequence[Strategy], row: RowText) -> Strategy:
        """The strategy of an op that a row stands for."""
        op, *texts = row
        operands, results = (tuple(map(parse_sbp, _ND.findall(text))) for text in texts)
        same = (s for s in listed if s.operands == operands and s.results == results)
        strategy = next(same, None) if op == node.op else None
        if strategy is None:
            legal = f"one of the {len(listed)} signatures that {node.op} has here"
            raise NotTaken(f"{node.op} at {node.source}", f"{op}: {texts[0]} -> {texts[1]}", legal)
        return strategy


def chosen_by(record: ChoiceRecord, candidates: Candidates, asked: Boundary) -> ChosenSignatures:
    """What a record says of a program.

    Arguments:
      asked: what is asked of arguments and results now.

    Raises:
      NotTaken: if that is no choice for this program.
    """
    graph = candidates.graph
    strategies = dict(_Reader(record, candidates).strategies())
    _check_ends("argument", graph, graph.inputs, record.inputs, asked.inputs, candidates.placement)
    tied = [w if t is None else record.inputs[t] for w, t in zip(asked.outputs, asked.ties, strict=True)]
    _check_ends("result", graph, graph.outputs, record.outputs, tied, candidates.placement)
    borders = [n for n in graph.walk() if n.bodies]
    if len(borders) != len(record.ports) or any(
        len(ports) != len(candidates.ports[n.id]) for n, ports in zip(borders, record.ports, strict=True)
    ):
        raise NotTaken("the program", "other loops and branches", "those of this one")
    if any(not 0 <= v < len(graph.values) for v in record.shares):
        raise NotTaken("the program", "values that are not there", "those of this one")
    ids = _user_ids(graph)
    return ChosenSignatures(
        record.inputs,
        record.outputs,
        strategies,
        {n.id: ports for n, ports in zip(borders, record.ports, strict=True)},
        record.shares,
        record.seconds,
        record.bound,
        {v: _clusters(ids, near) for v, near in record.clusters.items()},
        record.cheapest_seconds,
        _recomputed(record, candidates, ids),
    )


def _recomputed(record: ChoiceRecord, c: Candidates, ids: Sequence[int]) -> dict[int, RecomputedValue]:
    """What is made again, with the strategies of the graph at hand."""
    makers, reader, found = {v: n for n in c.graph.nodes for v in n.outputs}, _Reader(record, c), {}
    for v, (row, users, share, near) in record.recomputed.items():
        if v not in makers or makers[v].bodies:
            raise NotTaken("the program", f"value {v} to be made again", "results of its own ops")
        strategy = reader.strategy(makers[v], c.strategies[makers[v].id], row)
        found[v] = RecomputedValue(strategy, _users(ids, users), share, _clusters(ids, near))
    return found


def _check_ends(
    what: str,
    graph: Graph,
    ends: Sequence[Operand],
    nds: Sequence[NdSbp],
    wanted: Sequence[NdSbp | None],
    placement: Placement,
) -> None:
    """Whether arguments or results can lie as a record says."""
    if len(ends) != len(nds):
        raise NotTaken("the program", f"{len(nds)} {what}s", f"{len(ends)}")
    known: dict[Any, tuple[NdSbp, ...]] = {}
    for i, (x, nd, asked) in enumerate(zip(ends, nds, wanted, strict=True)):
        value = graph.operand(x)
        key = asked, value.shape, str(value.dtype)
        if key not in known:
            known[key] = allowed_at_rest(asked, value.shape, value.dtype, placement)
        legal = ((B,) * placement.ndim,) if isinstance(x, Const) else known[key]
        if nd not in legal:
            one = format_sbp(legal[0])
            said = one if len(legal) == 1 else f"one of {len(legal)} signatures, such as {one}"
            raise NotTaken(f"{what} {i}", format_sbp(nd), said)


def record_data(record: ChoiceRecord) -> dict[str, Any]:
    """A record as JSON has it."""
    return {
        "program": record.program,
        "costs": record.costs,
        "made_by": record.made_by,
        "asked_inputs": [_asked(nd) for nd in record.asked_inputs],
        "asked_outputs": [_asked(nd) for nd in record.asked_outputs],
        "inputs": list(map(format_sbp, record.inputs)),
        "outputs": list(map(format_sbp, record.outputs)),
        "rows": list(map(list, record.rows)),
        "ops": list(record.ops),
        "ports": [list(map(format_sbp, ports)) for ports in record.ports],
        "shares": {str(v): format_sbp(nd) for v, nd in record.shares.items()},
        "seconds": record.seconds,
        "bound": record.bound,
        "notes": list(record.notes),
        "clusters": {str(v): _near_data(near) for v, near in record.clusters.items()},
        "cheapest_seconds": record.cheapest_seconds,
        "recomputed": {
            str(v): [list(row), list(users), _asked(nd), _near_data(near)]
            for v, (row, users, nd, near) in record.recomputed.items()
        },
    }


def _near_data(near: Iterable[ClusterText]) -> list[Any]:
    return [[list(users), _asked(nd)] for users, nd in near]


def _read_near(data: Iterable[Any]) -> tuple[ClusterText, ...]:
    return tuple((tuple(map(int, users)), _read_asked(t)) for users, t in data)


def _read_asked(text: str | None) -> NdSbp | None:
    return None if text is None else parse_sbp(text)


def _asked(nd: NdSbp | None) -> str | None:
    return None if nd is None else format_sbp(nd)


def read_record(data: Mapping[str, Any]) -> ChoiceRecord:
    """What `record_data` has written.

    Raises:
      KeyError, TypeError, ValueError: if it has not.
    """
    rows = tuple((str(op), str(ins), str(outs)) for op, ins, outs in data["rows"])
    ops = tuple(map(int, data["ops"]))
    if any(not 0 <= row < len(rows) for row in ops):
        raise ValueError("an op with a row that is not there")
    return ChoiceRecord(
        str(data["program"]),
        str(data["costs"]),
        str(data["made_by"]),
        tuple(map(_read_asked, data["asked_inputs"])),
        tuple(map(_read_asked, data["asked_outputs"])),
        tuple(map(parse_sbp, data["inputs"])),
        tuple(map(parse_sbp, data["outputs"])),
        rows,
        ops,
        tuple(tuple(map(parse_sbp, ports)) for ports in data["ports"]),
        {int(v): parse_sbp(nd) for v, nd in data["shares"].items()},
        float(data["seconds"]),
        float(data["bound"]),
        tuple(map(str, data["notes"])),
        {int(v): _read_near(near) for v, near in data["clusters"].items()},
        None if data["cheapest_seconds"] is None else float(data["cheapest_seconds"]),
        {
            int(v): ((str(op), str(ins), str(outs)), tuple(map(int, users)), _read_asked(t), _read_near(near))
            for v, ((op, ins, outs), users, t, near) in data.get("recomputed", {}).items()
        },
    )
