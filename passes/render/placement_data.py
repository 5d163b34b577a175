"""A placement as the page of a plan draws it: devices by axes and hosts, and what lies there."""

import math
from collections.abc import Mapping
from typing import Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.explain.rest_lines import rest_lines
from sbp.text.units import bytes_text


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
        return "which exchange nothing"
    found = [plan.hardware.link(group) for group in groups]
    link = min(found, key=lambda x: x.bytes_per_second)
    first, *more = plan.hardware.links
    where = "between hosts" if more and link != first else "in a host"
    rate = f", {bytes_text(link.bytes_per_second)}/s" if math.isfinite(link.bytes_per_second) else ""
    return f"{where}{rate} each way"


def _at_rest(plan: PlanData, whole: PlanData) -> Mapping[str, list[Any]]:
    """Arguments, and results that do not lie as these; not what other placements send or get."""
    ins, outs = rest_lines(plan, whole)
    lines = [*ins, *(line for line in outs if not line[1].startswith("as "))]
    return {name: [line[k] for line in lines] for k, name in enumerate(("path", "sbp", "leaves"))}
