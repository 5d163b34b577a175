"""Matches each collective of a plan with instructions of the compiled program, and explains differences."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import networkx as nx
import numpy as np

from sbp.passes.boxing.moves import Move
from sbp.passes.explain.collectives import communication_steps
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.physical.program import Box
from sbp.runtime.hlo.origins import rows_in
from sbp.runtime.hlo.shapes import dtype_bytes
from sbp.runtime.target.collective_sites import CompiledCollective

AGAIN = ".remat"
"""In the name of what XLA computes or sends a second time (hlo_rematerialization.cc)."""
TOLERANCE = 0.01
"""How far bytes of the compiled program may be from those of the plan before it needs a reason, relative."""


@dataclass(frozen=True, slots=True)
class RowMatch:
    """The instructions of one collective of the plan.

    Arguments:
      row: its name.
      instructions: those that are executed for it; if XLA removed it, those of an equal collective.
      remark: one sentence; "" if it is one instruction of the planned kind, and its own.
      explained: whether the reason of a difference is known.
      removed: whether XLA left it out.
      changed: whether XLA sends it by another kind of collective, or in another dtype.
    """

    row: str
    instructions: tuple[str, ...]
    remark: str = ""
    explained: bool = True
    removed: bool = False
    changed: bool = False


def shared_code(plan: PlanData, found: Sequence[CompiledCollective]) -> list[CompiledCollective]:
    """The collectives of a program; in code that equal branches share, each gets the rows of all branches.

    A branch that occurs twice is one function of the lowered program, whose instructions are named after the
    first place where it stands; XLA copies them to the others.
    """
    named = {row for c in found for row in c.rows}
    sites = Counter(row for c in found for row in c.rows)
    alike: dict[object, list[str]] = {}
    for row in plan.collectives:
        alike.setdefault(_likeness(row), []).append(row.name)
    more: dict[str, list[str]] = {}
    for names in alike.values():
        nameless = [n for n in names if n not in named]
        several = [n for n in names if sites.get(n, 0) > 1]
        if nameless and several:
            more[several[0]] = nameless[: sites[several[0]] - 1]
    return [
        replace(c, rows=(*c.rows, *(x for row in c.rows for x in more.get(row, ())))) if more else c
        for c in found
    ]


def _likeness(c: Collective) -> object:
    """A key that is equal for rows of equal code."""
    return c.kind, c.shape, c.dtype, c.before, c.after, c.axes, c.wire_bytes


def fates(
    plan: PlanData, found: Sequence[CompiledCollective], lowered_text: Callable[[], str]
) -> tuple[RowMatch, ...]:
    """The match of each row: by the instructions that name it; for other rows, by what they move.

    Arguments:
      lowered_text: the program as XLA got it, with names; asked only if XLA left rows out.
    """
    of: dict[str, list[CompiledCollective]] = {c.name: [] for c in plan.collectives}
    for c in found:
        for row in c.rows:
            of[row].append(c)
    groups = _groups(plan, found)
    lost = [c.name for c in plan.collectives if not of[c.name]]
    gone = _gone(plan, lost, of, lowered_text) if lost else {}
    return tuple(gone.get(c.name) or _kept(c, of[c.name], groups[c.name]) for c in plan.collectives)


@dataclass(frozen=True, slots=True)
class _Together:
    """Rows and instructions that are connected: each instruction is executed for some of the rows."""

    rows: tuple[Collective, ...]
    made: tuple[CompiledCollective, ...]

    @property
    def planned_bytes(self) -> float:
        return math.fsum(c.wire_bytes for c in self.rows)

    @property
    def sent_bytes(self) -> float:
        return math.fsum(c.wire_bytes for c in self.made if not c.conditional)

    @property
    def as_planned(self) -> bool:
        return abs(self.sent_bytes - self.planned_bytes) <= TOLERANCE * max(self.planned_bytes, 1.0)

    def other_types(self) -> str:
        """That XLA sends other dtypes than planned, which explains the bytes; "" if it does not."""
        sent = [dtype_bytes(d) for c in self.made for d in c.dtypes]
        planned = [_itemsize(c.dtype) for c in self.rows]
        narrower = min(sent) < min(planned) or (len(sent) == len(planned) and sum(sent) < sum(planned))
        wider = max(sent) > max(planned)
        if not (narrower if self.sent_bytes < self.planned_bytes else wider):
            return ""
        types = ", ".join(dict.fromkeys(d for c in self.made for d in c.dtypes))
        asked = ", ".join(dict.fromkeys(c.dtype for c in self.rows))
        return f"XLA sends {types} for {asked}, and converts before or after"

    def hoist_reason(self) -> str:
        """That XLA moved it out of a loop; "" if it did not."""
        planned, done = max(c.count for c in self.rows), max(c.count for c in self.made)
        fewer = done < planned and self.sent_bytes < self.planned_bytes
        return f"out of its loop: {done} x for {planned} x planned" if fewer else ""

    def resend_reason(self) -> str:
        """That XLA sends more to keep less in memory; "" if it does not."""
        more = any(AGAIN in c.instruction for c in self.made) and self.sent_bytes > self.planned_bytes
        return "XLA sends it again where it took memory to be short (rematerialization)" if more else ""

    def partly(self) -> str:
        """That XLA sends less, of the same dtypes and as often; "" if it does not."""
        if self.sent_bytes > self.planned_bytes:
            return ""
        return (
            f"XLA sends {self.sent_bytes:.4g} of {self.planned_bytes:.4g} bytes; "
            "the rest is known, or not read"
        )


def _groups(plan: PlanData, found: Sequence[CompiledCollective]) -> Mapping[str, _Together]:
    """Per row: all rows and instructions that are connected with it."""
    rows, made = {c.name: c for c in plan.collectives}, {c.instruction: c for c in found}
    graph = nx.Graph()
    graph.add_nodes_from(("row", name) for name in rows)
    graph.add_edges_from((("row", row), ("made", c.instruction)) for c in found for row in c.rows)
    out: dict[str, _Together] = {}
    for group in nx.connected_components(graph):
        names = {kind: [name for k, name in group if k == kind] for kind in ("row", "made")}
        together = _Together(tuple(rows[x] for x in names["row"]), tuple(made[x] for x in names["made"]))
        out.update(dict.fromkeys(names["row"], together))
    return out


def _kept(row: Collective, made: Sequence[CompiledCollective], group: _Together) -> RowMatch:
    """The match of a row that instructions name."""
    remarks = []
    # Rounds that run only if data demand it are none of the plan's.
    made = [c for c in made if not c.conditional] or made
    others = {c.kind for c in made} - {row.kind}
    if others:
        remarks.append(f"XLA makes {' and '.join(sorted(others)).replace('_', '-')} of it")
    beside = sorted({r for c in made for r in c.rows if r != row.name})
    if beside:
        remarks.append(f"sent together with {_listed(beside)}")
    if len(made) > 1:
        remarks.append(f"sent by {len(made)} instructions")
    reason = (
        ""
        if group.as_planned
        else (group.other_types() or group.hoist_reason() or group.resend_reason() or group.partly())
    )
    if reason:
        remarks.append(reason)
    elif not group.as_planned:
        remarks.append(f"XLA sends {group.sent_bytes:.4g} bytes for {group.planned_bytes:.4g} planned")
    names = tuple(c.instruction for c in made)
    known = group.as_planned or bool(reason)
    return RowMatch(row.name, names, "; ".join(remarks), known, changed=bool(others or reason))


def _itemsize(dtype: str) -> int:
    """Bytes of an element as it is sent; random keys are sent as their words."""
    return 4 if dtype.startswith("key<") else np.dtype(dtype).itemsize


def _listed(rows: Sequence[str]) -> str:
    """
    >>> _listed(["row1"]), _listed(["row1", "row2", "row3", "row4"])
    ('row1', 'row1, row2 and 2 more')
    """
    return ", ".join(rows) if len(rows) < 4 else f"{', '.join(rows[:2])} and {len(rows) - 2} more"


def _gone(
    plan: PlanData,
    lost: Sequence[str],
    of: Mapping[str, Sequence[CompiledCollective]],
    lowered_text: Callable[[], str],
) -> dict[str, RowMatch]:
    """The matches of rows that no instruction names."""
    meaning = _meanings(plan)
    sent = {meaning[name]: name for name, made in of.items() if made and name in meaning}
    lowered, out = rows_in(lowered_text()), {}
    for name in lost:
        twin = sent.get(meaning[name]) if name in meaning else None
        if twin is not None:
            remark = f"removed: equal to {twin}, which XLA sends once for both"
        elif name not in lowered:
            remark = "removed: nothing reads it"
        else:
            remark = "removed: XLA knows the value, or that nothing reads it"
        made = tuple(c.instruction for c in of[twin]) if twin else ()
        out[name] = RowMatch(name, made, remark, removed=True)
    return out


def _meanings(plan: PlanData) -> dict[str, tuple[int, Move]]:
    """A key per row that is a move: equal keys mean equal tensors."""
    if plan.physical is None:
        return {}
    steps = [what for what, _ in communication_steps(plan.physical)]
    return {
        c.name: (s.value, s.move) for c, s in zip(plan.collectives, steps, strict=True) if isinstance(s, Box)
    }
