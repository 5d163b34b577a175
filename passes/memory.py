"""The memory limit: a plan that needs more than a device has is refused, with the largest tensors named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sbp.errors import MemoryLimitError, Problem
from sbp.passes.explain import Plan
from sbp.passes.graph import Const
from sbp.passes.names import Names
from sbp.passes.physical import Physical, Version, reads, writes
from sbp.passes.plan.cost import local_bytes
from sbp.passes.report import bytes_text
from sbp.signature import B, format_sbp

SHOWN = 5


@dataclass(frozen=True, slots=True)
class Live:
    """A tensor that is alive at the peak.

    Arguments:
      version: which tensor, under which signature.
      bytes: of one device's shard.
    """

    version: Version
    bytes: float


def live_at_peak(physical: Physical) -> list[Live]:
    """What one device holds when it holds most, the largest first; bodies of loops count as one op."""
    graph, hierarchy = physical.graph, physical.placement.shape

    def live(version: Version) -> Live:
        value = graph.values[version[0]]
        return Live(version, local_bytes(value.shape, value.dtype, version[1], hierarchy))

    arguments = list(zip(graph.inputs, physical.inputs, strict=True))
    outputs = zip(graph.outputs, physical.outputs, strict=True)
    results = [(x, nd) for x, nd in outputs if not isinstance(x, Const)]
    last = {version: i for i, step in enumerate(physical.steps) for version in reads(step)}
    last.update(dict.fromkeys([*arguments, *results], len(physical.steps)))
    now = {v: live(v) for v in arguments}
    peak, most = list(now.values()), sum(x.bytes for x in now.values())
    for i, step in enumerate(physical.steps):
        now.update((v, live(v)) for v in writes(step) if v in last)
        held = sum(x.bytes for x in now.values())
        if held > most:
            peak, most = list(now.values()), held
        now = {v: x for v, x in now.items() if last[v] > i}
    return sorted(peak, key=lambda x: -x.bytes)


def check_limit(plan: Plan, limit_bytes: float | None) -> None:
    """Refuses a plan that needs too much.

    Raises:
      MemoryLimitError: with the largest tensors at the peak, how they lie, and what to try.
    """
    if limit_bytes is None or plan.memory_bytes <= limit_bytes or plan.physical is None:
        return
    live = live_at_peak(plan.physical)
    names = Names(plan.physical.graph, plan.in_paths, plan.out_paths)
    largest = [
        f"{names.of(v)} {format_sbp(nd)} {bytes_text(x.bytes)}" for x in live[:SHOWN] for v, nd in [x.version]
    ]
    more = [f"{len(live) - SHOWN} smaller"] if len(live) > SHOWN else []
    raise MemoryLimitError(
        Problem(
            "memory",
            f"{plan.name} on {plan.placement}, Options(memory_limit={limit_bytes:.4g})",
            f"{bytes_text(plan.memory_bytes)} per device at the peak",
            f"at most {bytes_text(limit_bytes)}",
            "alive at the peak: " + ", ".join([*largest, *more]),
            _advice(plan, live),
        )
    )


def _advice(plan: Plan, live: Sequence[Live]) -> str:
    """What would make the largest tensors smaller."""
    assert plan.physical is not None
    graph = plan.physical.graph
    paths = dict(zip(graph.inputs, plan.in_paths, strict=False))
    whole = [
        paths[v]
        for x in live
        for v, nd in [x.version]
        if v in paths and all(s == B for s in nd) and max(graph.values[v].shape, default=1) > 1
    ]
    advice = [f"split what lies whole on every device: in_sbp for {', '.join(whole[:3])}"] if whole else []
    inside = [x for x in live[:SHOWN] if x.version[0] not in paths]
    if inside:
        advice.append("jax.checkpoint around a layer, so that its activations are not kept")
    return "; ".join([*advice, "a placement with more devices, or a smaller batch"])
