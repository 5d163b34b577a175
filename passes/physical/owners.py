"""Sums that wait: whose their parts are, and what is computed from the parts before they are added up.

Of some sums each element is one device's, and the others have zeros there: a row that is looked up in a
split table, sliced out of a split dim, or filled in. Moved about, it stays so. The reduction of such a sum
computes nothing: it brings the owner's bits, a -0.0 included (communication/bits.py). As soon as numbers are
computed from the parts, that is over, and infinities may turn into NaN: the plan says where (decision 0004).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from sbp.passes.boxing.moves import Move
from sbp.passes.physical.program import Border, Compute, Physical, Step, Version
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const
from sbp.signature import NdSbp, P

OwnedAxes: TypeAlias = frozenset[int]
NONE: OwnedAxes = frozenset()


def mark_owners(physical: Physical) -> Physical:
    """The same program, its moves that add up sums of owned elements marked; itself if it is marked so."""
    steps = _marked(physical.steps, {})
    same = all(a is b for a, b in zip(steps, physical.steps, strict=True))
    return physical if same else replace(physical, steps=steps)


def _marked(steps: Sequence[Step], owned: dict[Version, OwnedAxes]) -> tuple[Step, ...]:
    """The steps of one body; `owned` says along which axes each version is owned, and is added to."""
    out: list[Step] = []
    known = dict[int, bool]()  # whether a strategy leaves sums: equal layers have the same ones, as objects
    for step in steps:
        if isinstance(step, Border):
            step = _border(step, owned)
        elif isinstance(step, Compute):
            key = id(step.strategy)
            if key not in known:
                known[key] = any(P in nd for nd in step.strategy.results)
            if known[key]:
                owned.update(_computed(step, owned))
        else:
            before = owned.get((step.value, step.move.before), NONE)
            owned[step.value, step.move.after] = _moved(step.move, before)
            is_owned = _adds_up(step.move) and before.issuperset(step.move.axes)
            step = step if step.owned is is_owned else replace(step, owned=is_owned)
        out.append(step)
    return tuple(out)


def _adds_up(move: Move) -> bool:
    return move.kind in ("all_reduce", "reduce_scatter") and move.old == P


def _moved(move: Move, before: OwnedAxes) -> OwnedAxes:
    """Axes along which the moved version is owned: a move that makes a sum puts zeros beside one part."""
    made = frozenset(move.axes) if move.kind in ("fill", "embed") and move.new == P else NONE
    return frozenset(a for a in before | made if move.after[a] == P)


def _computed(step: Compute, owned: Mapping[Version, OwnedAxes]) -> dict[Version, OwnedAxes]:
    """Axes along which the results of an op are owned."""
    node, strategy = step.node, step.strategy
    ins = list(zip(node.inputs, strategy.operands, strict=True))

    def owned_along(axis: int) -> bool:
        # A scalar of the program is on the first device; an annotation has no rows: it changes nothing.
        parts = [isinstance(x, Const) or axis in owned.get((x, nd), NONE) for x, nd in ins if nd[axis] == P]
        row = strategy.rows[axis] if strategy.rows else None
        return all(parts) and (row is None or (row.moves if parts else row.owned))

    found = {a for nd in strategy.results for a, s in enumerate(nd) if s == P and owned_along(a)}
    results = zip(node.outputs, strategy.results, strict=True)
    return {(v, nd): frozenset(a for a in found if nd[a] == P) for v, nd in results}


def _border(step: Border, owned: dict[Version, OwnedAxes]) -> Border:
    """A loop or a branch: a carried sum is owned if it is so at entry and at every exit."""
    wired = list(zip(ports(step.node), step.inner_signatures, strict=True))
    inside = [_at_entry(step, p.operand, p.outer(nd), nd, owned) for p, nd in wired]
    while True:
        bodies, exits = [], list(inside)
        for k, body in enumerate(step.bodies):
            inner = dict(owned)
            for (port, nd), axes in zip(wired, inside, strict=True):
                inner.update({(v, nd): axes for v in port.enters})
            bodies.append(_marked(body, inner))
            for i, (port, nd) in enumerate(wired):
                for x in port.left_by(k):
                    if not isinstance(x, Const):
                        exits[i] &= inner.get((x, nd), NONE)
        if exits == inside or not any(p.enters for p, _ in wired):
            break
        inside = exits
    for (port, nd), axes in zip(wired, exits, strict=True):
        if port.result is not None:
            owned[step.node.outputs[port.result], port.outer(nd)] = axes
    return replace(step, bodies=tuple(bodies))


def _at_entry(
    step: Border, operand: int | None, outer: NdSbp, nd: NdSbp, owned: Mapping[Version, OwnedAxes]
) -> OwnedAxes:
    """Axes along which what enters is owned; what only leaves is so unless a body says otherwise."""
    every = frozenset(a for a, s in enumerate(nd) if s == P)
    if operand is None:
        return every
    x = step.node.inputs[operand]
    return every if isinstance(x, Const) else owned.get((x, outer), NONE) & every
