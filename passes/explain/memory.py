"""Memory: a plan that needs more than it may is refused, or says so, with the largest tensors named."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from sbp.compat import core
from sbp.errors import MemoryLimitError, Problem
from sbp.hardware.catalogue import Hardware
from sbp.layout import allowed_at_rest, local_shape
from sbp.passes.boxing.links import Network
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.memory import Live, SmallestPeak
from sbp.passes.plan.model import Boundary
from sbp.passes.program.graph import Const, Graph
from sbp.passes.program.names import Names
from sbp.placement import Placement
from sbp.signature import B, NdSbp, format_sbp
from sbp.text.units import bytes_text

SHOWN = 5
_ANYWAY = "Options(memory_limit=math.inf) to see the fastest plan of any size"
_MORE_DEVICES = "a placement with more devices, or a smaller batch"


def live_at_peak(plan: PlanData, donated: Sequence[int] = ()) -> list[Live]:
    """What one device holds when it holds most, the largest first.

    Arguments:
      donated: positions of arguments whose memory the results may take.
    """
    assert plan.physical is not None
    return Evaluator(plan.physical, Network(plan.placement, plan.hardware), donated).at_peak


@dataclass(frozen=True, slots=True)
class AtRest:
    """What an argument or a result takes on each device between two steps, at the least.

    Arguments:
      nd: how it lies then.
      asked: whether that is said of an argument; else it is split as far as it may be.
    """

    name: str
    nd: NdSbp
    bytes: float
    asked: bool


def check_rest(
    name: str,
    rest: Sequence[AtRest],
    placement: Placement,
    hardware: Hardware,
    limit_bytes: float | None,
    donated: Sequence[int],
) -> None:
    """Refuses, before any search, arguments and results that are too much however they lie.

    Arguments:
      name: of the program.
      limit_bytes: that was asked for; None for what the device has.
      donated: positions of arguments whose memory the results may take.

    Raises:
      MemoryLimitError: with the largest of them, and what to try.
    """
    need = math.fsum(x.bytes for x in rest)
    if need <= (hardware.memory_bytes if limit_bytes is None else limit_bytes):
        return
    asked, legal = _limit(hardware, limit_bytes)
    largest = [f"{x.name} {format_sbp(x.nd)} {bytes_text(x.bytes)}" for x in rest]
    whole = [x.name for x in rest if x.asked and all(s == B for s in x.nd)]
    again = [] if donated else ["donate_argnums for state that comes back"]
    last = _ANYWAY if limit_bytes is not None else "Options(memory_limit=...) if a device has more"
    raise MemoryLimitError(
        Problem(
            "memory",
            f"{name} on {placement}{asked}",
            f"{bytes_text(need)} per device only for arguments and results",
            legal,
            f"at rest: {_shown(largest, len(rest))}",
            "; ".join([*again, *_split(whole), _MORE_DEVICES, last]),
        )
    )


def at_rest(
    graph: Graph,
    paths: tuple[Sequence[str], Sequence[str]],
    asked: Boundary,
    placement: Placement,
    donated: Sequence[int] = (),
) -> list[AtRest]:
    """Arguments and results as one device holds them between two steps at the least, the largest first.

    A result that may take the memory of a donated argument is not counted. Of a placement in a pipeline, what
    comes from others and goes to them is no argument and no result.
    """

    def least(name: str, v: int, nd: NdSbp | None) -> AtRest:
        value = graph.values[v]
        lying = allowed_at_rest(nd, value.shape, value.dtype, placement)
        sizes = [math.prod(local_shape(value.shape, x, placement.shape)) for x in lying]
        size = min(sizes)
        return AtRest(name, lying[sizes.index(size)], size * core.itemsize(value.dtype), nd is not None)

    def kind(v: int) -> object:
        return graph.values[v].shape, graph.values[v].dtype

    # Arrays that are closed over stand behind the arguments, and have no path.
    names = chain(paths[0], (graph.values[v].name for v in graph.inputs[len(paths[0]) :]))
    ins = list(zip(names, graph.inputs, asked.inputs, strict=True))
    free = Counter(kind(graph.inputs[i]) for i in donated)
    found = [least(*x) for x in ins if not x[0].startswith("from ")]
    for name, x, nd, tie in zip(paths[1], graph.outputs, asked.outputs, asked.ties, strict=True):
        if isinstance(x, Const) or name.startswith("to "):
            continue
        if free[kind(x)]:
            free[kind(x)] -= 1
        else:
            found.append(replace(least(name, x, nd if tie is None else asked.inputs[tie]), asked=False))
    return sorted(found, key=lambda x: -x.bytes)


def _limit(hardware: Hardware, limit_bytes: float | None) -> tuple[str, str]:
    """What a plan may need, as it was asked for, and in words."""
    if limit_bytes is None:
        return "", f"at most {bytes_text(hardware.memory_bytes)}, which {hardware.name} has"
    return f", Options(memory_limit={limit_bytes:.4g})", f"at most {bytes_text(limit_bytes)}"


def over_limit(
    plan: PlanData, limit_bytes: float | None, smallest: SmallestPeak | None, donated: Sequence[int] = ()
) -> Problem:
    """What is wrong with a plan that needs too much: how much would be enough, and what is largest.

    Arguments:
      limit_bytes: that was asked for; None for what the device has.
      smallest: the least that is known to be needed, of this plan if None.
      donated: positions of arguments whose memory the results may take.
    """
    asked, legal = _limit(plan.hardware, limit_bytes)
    if smallest is None:
        assert plan.physical is not None
        smallest = SmallestPeak(plan.physical, plan.memory_bytes, 0.0)
    # What stands out in the smallest plan is what has to become smaller.
    least = replace(plan, physical=smallest.physical)
    live = live_at_peak(least, donated)
    bound = ""
    if smallest.bound_bytes > 0:
        bound = f", and none below {bytes_text(smallest.bound_bytes)} by the search's count"
    return Problem(
        "memory",
        f"{plan.name} on {plan.placement}{asked}",
        f"{bytes_text(plan.memory_bytes)} per device at the peak",
        legal,
        f"the smallest peak that was found is {bytes_text(smallest.bytes)}"
        f"{bound}; alive there: {_largest(least, live)}",
        f"{_advice(least, live)}; {_ANYWAY}",
    )


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
    capacity = plan.hardware.memory_bytes
    has = "" if math.isinf(capacity) else f"; {plan.hardware.name} has {bytes_text(capacity)}"
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
    return _shown(largest, len(live))


def _shown(largest: Sequence[str], count: int) -> str:
    """The first of so many texts."""
    return ", ".join([*largest[:SHOWN], *([f"{count - SHOWN} smaller"] if count > SHOWN else [])])


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
    advice = _split(whole)
    ends = {*graph.inputs, *graph.outputs}
    if any(x.version[0] not in ends for x in live[:SHOWN]):
        advice.append("jax.checkpoint around a layer, so that its activations are not kept")
    return "; ".join([*advice, _MORE_DEVICES])


def _split(whole: Sequence[str]) -> list[str]:
    """What to try with arguments that are whole on every device."""
    return (
        [f"split tensors that are whole on every device: in_sbp for {', '.join(whole[:3])}"] if whole else []
    )
