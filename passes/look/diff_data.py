"""Two plans side by side as data of a page: the graph of one, with what the other sends besides."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sbp.passes.explain.plan import Collective, PlanData, together
from sbp.passes.explain.words import verdict_text
from sbp.passes.look.diff import changed_signatures
from sbp.passes.look.page_data import columns, row_columns
from sbp.passes.program.names import without_indices

CHANGES = ("added", "removed", "changed", "same")


def row_key(c: Collective) -> Hashable:
    """What a reader would call the same in two plans."""
    return c.kind, without_indices(c.tensor), c.shape, c.dtype, c.before, c.after, c.axes, c.source


def totals(plan: PlanData) -> dict[Hashable, Collective]:
    """The collectives of a plan, those that a reader would call the same as one."""
    found: dict[Hashable, list[Collective]] = {}
    for c in plan.collectives:
        found.setdefault(row_key(c), []).append(c)
    return {key: together(same) for key, same in found.items()}


def diff_data(
    a: tuple[PlanData, Mapping[str, Any]], b: tuple[PlanData, Mapping[str, Any]], names: tuple[str, str]
) -> dict[str, Any]:
    """The data of the page of two plans.

    Arguments:
      a, b: the plans, each with what its own page is given. The graph is that of `b`; what only `a` sends
        stands where its group would be.
      names: what the plans are called.
    """
    (one, drawn_a), (two, drawn_b) = a, b
    ours, theirs = totals(one), totals(two)
    found = dict(drawn_b)
    gone = [key for key in ours if key not in theirs]
    found["rows"], found["sent"] = _with_gone(drawn_a, drawn_b, [ours[key] for key in gone])
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


def _with_gone(
    a: Mapping[str, Any], b: Mapping[str, Any], gone: Sequence[Collective]
) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """The rows and collectives of `b`, and behind them those of `a` that it does not have."""
    extra = row_columns(gone)
    rows = {name: [*b["rows"][name], *extra[name]] for name in b["rows"]}
    names = ("kind", "parent", "rows", "count", "bytes", "seconds", "exposed")
    none: dict[str, list[Any]] = {name: [] for name in names}
    sent = {name: list(xs) for name, xs in b.get("sent", none).items()}
    if "groups" not in a or "groups" not in b:
        return rows, sent
    at = {path: k for k, path in reversed(list(enumerate(_paths(b["groups"]))))}
    paths = _paths(a["groups"])
    for k, c in enumerate(gone):
        own = {*c.name.split("+")}
        which = [n for n, names in enumerate(a["rows"]["names"]) if own & {*names.split("+")}]
        places = [n for n, of in enumerate(a["sent"]["rows"]) if set(which) & set(of)]
        parent = _nearest(paths[a["sent"]["parent"][places[0]]], at) if places else 0
        row = (c.kind, parent, [len(b["rows"]["kind"]) + k], c.count, c.wire_bytes, c.seconds, 0.0)
        for name, x in zip(none, row, strict=True):
            sent[name].append(x)
    return rows, sent


def _paths(groups: Mapping[str, list[Any]]) -> list[tuple[str, ...]]:
    """Of every group its title and those around it."""
    found: list[tuple[str, ...]] = []
    for title, parent in zip(groups["title"], groups["parent"], strict=True):
        found.append(() if parent < 0 else (*found[parent], title))
    return found


def _nearest(path: tuple[str, ...], at: Mapping[tuple[str, ...], int]) -> int:
    """The innermost group of another graph that is called as one of these is."""
    return next((at[path[:n]] for n in range(len(path), 0, -1) if path[:n] in at), 0)
