"""Two plans side by side as data of a page: the graph of one, with what the other sends besides."""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sbp.passes.explain.plan import Collective, PlanData, merged_collective
from sbp.passes.explain.words import verdict_text
from sbp.passes.render.diff import NO_LINES, changed_signatures, row_key, same_lines
from sbp.passes.render.page_data import columns, row_columns

CHANGES = ("added", "removed", "changed", "same")


def totals(plan: PlanData, lines: Mapping[str, str] = NO_LINES) -> dict[Hashable, Collective]:
    """The collectives of a plan, those that a reader would call the same as one.

    Arguments:
      lines: what its lines are called in the other plan.
    """
    found: dict[Hashable, list[Collective]] = {}
    for c in plan.collectives:
        found.setdefault(row_key(c, lines), []).append(c)
    return {key: merged_collective(same) for key, same in found.items()}


def diff_data(
    a: tuple[PlanData, Mapping[str, Any]], b: tuple[PlanData, Mapping[str, Any]], names: tuple[str, str]
) -> dict[str, Any]:
    """The data of the page of two plans.

    Arguments:
      a, b: the plans, each with what its own page is given. The graph is that of `b`; what only `a` sends
        stands in it too, between the groups that it stood between.
      names: what the plans are called.
    """
    (one, drawn_a), (two, drawn_b) = a, b
    lines = same_lines(drawn_a.get("lines", {}), drawn_b.get("lines", {}))
    ours, theirs = totals(one, lines), totals(two)
    found = dict(drawn_b)
    gone = [key for key in ours if key not in theirs]
    found |= _Union(drawn_a, drawn_b).columns([ours[key] for key in gone])
    status = {key: _change(ours.get(key), theirs.get(key)) for key in {**ours, **theirs}}
    names_of = {
        name: key for key, c in (*ours.items(), *theirs.items()) for name in c.name.split("+") if name
    }
    keys = [names_of.get(n.split("+")[0]) for n in drawn_b["rows"]["names"]] + gone
    found["rows"] = found["rows"] | {"change": [status.get(key, "same") for key in keys]}
    found["diff"] = {
        "names": list(names),
        "plans": [f"{p.name} on {p.placement}, {p.hardware.name}" for p in (one, two)],
        "figures": [drawn_a["figures"], drawn_b["figures"]],
        "verdicts": [verdict_text(one), verdict_text(two)],
        "rows": _changed_rows(ours, theirs, status),
        "signatures": columns(("title", "path", "before", "after"), _signatures(one, two)),
    }
    return found


def _signatures(a: PlanData, b: PlanData) -> list[tuple[str, str, str, str]]:
    return [(title, *pair) for title, pairs in changed_signatures(a, b).items() for pair in pairs]


def _change(before: Collective | None, after: Collective | None) -> str:
    if before is None or after is None:
        return "added" if before is None else "removed"
    equal = (before.count, before.wire_bytes) == (after.count, after.wire_bytes)
    return "same" if equal else "changed"


def _changed_rows(
    ours: Mapping[Hashable, Collective], theirs: Mapping[Hashable, Collective], status: Mapping[Hashable, str]
) -> dict[str, list[Any]]:
    """What is different, what gains or costs most first."""
    rows = []
    for key, change in status.items():
        if change != "same":
            some = theirs.get(key) or ours[key]
            one, two = (
                side.get(key) or replace(some, count=0, wire_bytes=0.0, seconds=0.0, exposed_seconds=0.0)
                for side in (ours, theirs)
            )
            rows.append((two.seconds - one.seconds, change, one, two))
    rows.sort(key=lambda r: (-abs(r[0]), str(r[3])))
    listed = row_columns([two for *_, two in rows])
    return listed | {
        "change": [change for _, change, _, _ in rows],
        "seconds": [seconds for seconds, *_ in rows],
        "bytes": [two.wire_bytes - one.wire_bytes for *_, one, two in rows],
        "times": [two.count - one.count for *_, one, two in rows],
        "exposed": [two.exposed_seconds - one.exposed_seconds for *_, one, two in rows],
    }


SENT = ("kind", "parent", "rows", "count", "bytes", "seconds", "exposed")
EDGE = ("from", "to", "bytes", "next", "count", "tensors")


class _Union:
    """The graph of one plan with what only another sends.

    Arguments:
      a, b: what their pages are given.
    """

    def __init__(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        self.a, self.b = a, b
        self.drawn = "groups" in a and "groups" in b
        self.paths = _paths(a["groups"]) if self.drawn else []
        self.at = {p: k for k, p in reversed(list(enumerate(_paths(b["groups"]))))} if self.drawn else {}

    def columns(self, gone: Sequence[Collective]) -> dict[str, Any]:
        """Rows, collectives and edges of `b`, and behind them those of `a` that it does not have."""
        a, b, extra = self.a, self.b, row_columns(gone)
        rows = {name: [*b["rows"][name], *extra[name]] for name in b["rows"]}
        if not self.drawn:
            return {"rows": rows}
        sent = {name: list(b["sent"][name]) for name in SENT}
        edges = {name: list(b["edges"][name]) for name in EDGE}
        node = len(b["groups"]["kind"]) + len(b["sent"]["kind"])
        for k, c in enumerate(gone):
            stood = self.stood(c)
            parent = _nearest(self.paths[a["sent"]["parent"][stood[0]]], self.at) if stood else 0
            one = (c.kind, parent, [len(b["rows"]["kind"]) + k], c.count, c.wire_bytes, c.seconds, 0.0)
            for name, x in zip(SENT, one, strict=True):
                sent[name].append(x)
            for edge in self.edges_of(stood, node + k):
                for name, x in zip(EDGE, edge, strict=True):
                    edges[name].append(x)
        return {"rows": rows, "sent": sent, "edges": edges}

    def stood(self, c: Collective) -> list[int]:
        """The places in which a collective stood, by their numbers among those of `a`."""
        own = {*c.name.split("+")} if c.name else set()
        rows = self.a["rows"]
        which = {k for k, names in enumerate(rows["names"]) if own & {*names.split("+")}}
        if not own:  # a send has no name
            kinds = zip(rows["kind"], rows["tensor"], rows["line"], strict=True)
            which = {k for k, said in enumerate(kinds) if said == (c.kind, c.tensor, c.source)}
        return [n for n, of in enumerate(self.a["sent"]["rows"]) if which & set(of)]

    def edges_of(self, stood: Sequence[int], node: int) -> Iterator[tuple[Any, ...]]:
        """The edges that a collective had, between the groups of `b` that are called as those of `a`."""
        n, e = len(self.paths), self.a["edges"]
        places = {n + k for k in stood}
        known: set[tuple[int, int]] = set()
        for source, target, size, is_next in zip(e["from"], e["to"], e["bytes"], e["next"], strict=True):
            if (source in places) == (target in places):
                continue
            other = target if source in places else source
            group = other if other < n else self.a["sent"]["parent"][other - n]
            at = _nearest(self.paths[group], self.at)
            pair = (node, at) if source in places else (at, node)
            if at and pair not in known:
                known.add(pair)
                yield *pair, size, is_next, 0, []


GroupPath = tuple[tuple[str, int], ...]
"""The titles of a group and of those around it, each with how many of this title stand before it there."""


def _paths(groups: Mapping[str, list[Any]]) -> list[GroupPath]:
    """The path of every group."""
    found: list[GroupPath] = []
    before: Counter[tuple[int, str]] = Counter()
    for title, parent in zip(groups["title"], groups["parent"], strict=True):
        found.append(() if parent < 0 else (*found[parent], (title, before[parent, title])))
        before[parent, title] += 1
    return found


def _nearest(path: GroupPath, at: Mapping[GroupPath, int]) -> int:
    """The innermost group of another graph that is called as one of these is."""
    return next((at[path[:n]] for n in range(len(path), 0, -1) if path[:n] in at), 0)
