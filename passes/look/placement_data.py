"""A placement as the page of a plan draws it: devices by axes and hosts, and what lies how along each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.words import collapse
from sbp.signature import format_sbp
from sbp.units import bytes_text


def place_data(plan: PlanData, whole: PlanData | None = None) -> dict[str, Any]:
    """A placement with its devices.

    Arguments:
      whole: the plan of the program that this one is of a placement of.

    `hosts` is how many devices a host has, None where there is one host; `levels` says of every axis what
    its devices talk through; `rest` is what lies there at rest, what lies alike as one.
    """
    placement, (inner, *outer) = plan.placement, plan.hardware.links
    return {
        "name": str(placement),
        "axes": list(placement.axes),
        "mesh": list(placement.shape),
        "ranks": list(placement.ranks),
        "hosts": inner.devices if outer and inner.devices < placement.size else None,
        "levels": [_level(plan, a) for a in range(placement.ndim)],
        "memory_bytes": plan.memory_bytes,
        "rest": _at_rest(plan, plan if whole is None else whole),
    }


def _level(plan: PlanData, axis: int) -> str:
    """What the devices of an axis talk through."""
    groups = plan.placement.groups([axis]).tolist()
    if len(groups[0]) == 1:
        return "which talk to nobody"
    found = [plan.hardware.link(group) for group in groups]
    link = min(found, key=lambda x: x.bytes_per_second)
    first, *more = plan.hardware.links
    where = "between hosts" if more and link != first else "in a host"
    rate = f", {bytes_text(link.bytes_per_second)}/s" if math.isfinite(link.bytes_per_second) else ""
    return f"{where}{rate} each way"


def _at_rest(plan: PlanData, whole: PlanData) -> Mapping[str, list[Any]]:
    """Arguments and results, but for what comes from other placements and goes there."""
    ins = [(p, nd) for p, nd in zip(plan.in_paths, plan.in_sbp, strict=True) if not p.startswith("from ")]
    outs = [(p, nd) for p, nd in zip(plan.out_paths, plan.out_sbp, strict=True) if not p.startswith("to ")]
    lines = [
        line
        for ends, every in ((ins, whole.in_paths), (outs, whole.out_paths))
        for line in collapse([p for p, _ in ends], [nd for _, nd in ends], every)
    ]
    return {
        "path": [path for path, _, _ in lines],
        "sbp": [format_sbp(nd) for _, nd, _ in lines],
        "leaves": [n for _, _, n in lines],
    }
