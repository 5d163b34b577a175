"""Memory: a plan that needs more than it may is refused, or says so, with the largest tensors named."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

from sbp.errors import MemoryLimitError, Problem
from sbp.passes.boxing.links import Network
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.fit import SmallestPeak
from sbp.passes.physical.fusing import ShardSizes
from sbp.passes.physical.memory import Live
from sbp.passes.program.graph import Const
from sbp.passes.program.names import Names
from sbp.signature import B, NdSbp, format_sbp
from sbp.text.units import bytes_text

SHOWN = 5


def live_at_peak(plan: PlanData, donated: Sequence[int] = ()) -> list[Live]:
    """What one device holds when it holds most, the largest first.

    Arguments:
      donated: positions of arguments whose memory the results may take.
    """
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(plan.placement, plan.hardware), donated).at_peak


def over_limit(
    plan: PlanData, limit_bytes: float | None, smallest: SmallestPeak | None, donated: Sequence[int] = ()
) -> Problem:
    """What is wrong with a plan that needs too much: how much would be enough, and what is largest.

    Arguments:
      limit_bytes: that was asked for; None for what the device has.
      smallest: the least that is known to be needed, of this plan if None.
      donated: positions of arguments whose memory the results may take.
    """
    if limit_bytes is None:
        asked, legal = "", f"at most {bytes_text(plan.hardware.memory_bytes)}, which {plan.hardware.name} has"
    else:
        asked, legal = f", Options(memory_limit={limit_bytes:.4g})", f"at most {bytes_text(limit_bytes)}"
    if smallest is None:
        assert plan.physical is not None
        smallest = SmallestPeak(plan.physical, plan.memory_bytes, 0.0)
    # What stands out in the smallest plan is what has to become smaller.
    least = replace(plan, physical=smallest.physical)
    live = live_at_peak(least, donated)
    bound = ""
    if smallest.bound_bytes > 0:
        bound = f", and none below {bytes_text(smallest.bound_bytes)} by the search's count"
    anyway = "Options(memory_limit=math.inf) to see the fastest plan of any size"
    return Problem(
        "memory",
        f"{plan.name} on {plan.placement}{asked}",
        f"{bytes_text(plan.memory_bytes)} per device at the peak",
        legal,
        f"the smallest peak that was found is {bytes_text(smallest.bytes)}"
        f"{bound}; alive there: {_largest(least, live)}",
        f"{_advice(least, live)}; {anyway}",
    )


def check_rest(plan: PlanData, donated: Sequence[int] = ()) -> None:
    """Refuses a plan whose arguments and results alone are more than a device has.

    Arguments:
      donated: positions of arguments whose memory the results may take.

    Raises:
      MemoryLimitError: with the largest of them, how they lie, and what to try.
    """
    if plan.physical is None or plan.fits:
        return
    rest = live_at_rest(plan, donated)
    need, has = sum(x.bytes for x in rest), plan.hardware.memory_bytes
    if need <= has:
        return
    again = "" if donated else "donate_argnums for state that comes back; "
    raise MemoryLimitError(
        Problem(
            "memory",
            f"{plan.name} on {plan.placement}",
            f"{bytes_text(need)} per device only for arguments and results",
            f"at most {bytes_text(has)}, which {plan.hardware.name} has",
            f"at rest: {_largest(plan, rest)}",
            f"{again}{_advice(plan, rest)}; Options(memory_limit=...) if a device has more",
        )
    )


def live_at_rest(plan: PlanData, donated: Sequence[int] = ()) -> list[Live]:
    """Arguments and results as one device holds them between two steps, the largest first.

    A result that may take the memory of a donated argument is not counted. Of a placement in a pipeline, what
    comes from others and goes to them is no argument and no result.
    """
    physical = plan.physical
    assert physical is not None
    graph, sizes = physical.graph, ShardSizes(physical)

    def live(x: int, nd: NdSbp) -> Live:
        return Live((x, nd), sizes.bytes((x, nd)))

    arguments = [live(x, nd) for x, nd in zip(graph.inputs, physical.inputs, strict=True)]
    # Arrays that are closed over stand behind the arguments, and have no path.
    paths = chain(plan.in_paths, repeat(""))
    own = [x for x, path in zip(arguments, paths, strict=False) if not path.startswith("from ")]

    def kind(x: Live) -> object:
        value = graph.values[x.version[0]]
        return value.shape, value.dtype, x.version[1]

    free = Counter(kind(arguments[i]) for i in donated)
    results = list[Live]()
    for path, x, nd in zip(plan.out_paths, graph.outputs, physical.outputs, strict=True):
        if isinstance(x, Const) or path.startswith("to "):
            continue
        result = live(x, nd)
        if free[kind(result)]:
            free[kind(result)] -= 1
        else:
            results.append(result)
    return sorted([*own, *results], key=lambda x: -x.bytes)


def with_warning(plan: PlanData, live: Sequence[Live]) -> PlanData:
    """The plan, with a note on what is largest and what to try if it does not fit its device.

    Arguments:
      live: what one device holds at the peak, the largest first.
    """
    if plan.fits or plan.physical is None:
        return plan
    note = (
        f"it does not fit: alive at the peak are {_largest(plan, live)}; try: {_advice(plan, live)}. "
        "Without Options(memory_limit=...) such a plan is refused"
    )
    return replace(plan, notes=(note, *plan.notes))


def ran_out(plan: PlanData, said: str, donated: Sequence[int] = ()) -> Problem:
    """What is wrong where the devices had less memory than a program took.

    Arguments:
      said: by the runtime.
      donated: positions of arguments whose memory the results may take.
    """
    live = live_at_peak(plan, donated)
    room = plan.hardware.memory_bytes
    has = "" if math.isinf(room) else f"; {plan.hardware.name} has {bytes_text(room)}"
    whole = [x for x in live if all(s == B for s in x.version[1])]
    zero = "optimizer state split over the data axis (in_sbp S(0), ZeRO); " if whole and donated else ""
    return Problem(
        "memory",
        f"{plan.name} on {plan.placement}",
        said,
        f"{bytes_text(plan.memory_bytes)} per device at the peak, by the plan{has}",
        f"alive at the peak, by the plan: {_largest(plan, live, lines=True)}",
        f"Options(memory_limit=...) below what is free, so that a plan that fits is searched for; {zero}"
        f"{_advice(plan, live)}; other programs and arrays of this process take memory too",
    )


def _largest(plan: PlanData, live: Sequence[Live], lines: bool = False) -> str:
    """The largest tensors by name, signature and bytes.

    Arguments:
      lines: whether shapes are said too, and the user's lines.
    """
    assert plan.physical is not None
    graph = plan.physical.graph
    names, made = Names(graph, plan.in_paths, plan.out_paths), graph.producers() if lines else {}

    def words(v: int) -> str:
        if not lines:
            return names.of(v)
        value, node = graph.values[v], made.get(v)
        at = f" at {node.source}" if node is not None else ""
        return f"{names.of(v)}{at} {value.dtype}{list(value.shape)}"

    largest = [
        f"{words(v)} {format_sbp(nd)} {bytes_text(x.bytes)}" for x in live[:SHOWN] for v, nd in [x.version]
    ]
    more = [f"{len(live) - SHOWN} smaller"] if len(live) > SHOWN else []
    return ", ".join([*largest, *more])


def _advice(plan: PlanData, live: Sequence[Live]) -> str:
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
    advice = [
        f"split tensors that are whole on every device: in_sbp for {', '.join(few)}"
        for few in [whole[:3]]
        if few
    ]
    ends = {*graph.inputs, *graph.outputs}
    if any(x.version[0] not in ends for x in live[:SHOWN]):
        advice.append("jax.checkpoint around a layer, so that its activations are not kept")
    return "; ".join([*advice, "a placement with more devices, or a smaller batch"])
