"""Attributes the time of a step to its kernels and collectives; the parts add up to the whole."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from sbp.runtime.profile.trace import OpEvent, TracedStep

KERNEL, SENDING, WAITING = range(3)
"""Who has an instant, the first of these that there is."""
Interval: TypeAlias = tuple[float, float, int, str]
"""From, until, which of the three, and the instruction."""
ByInstruction: TypeAlias = defaultdict[str, float]
"""By instruction."""


def _three() -> tuple[ByInstruction, ByInstruction, ByInstruction]:
    return defaultdict(float), defaultdict(float), defaultdict(float)


@dataclass
class StepAttribution:
    """The time of a step by cause, in seconds, as the mean of its devices.

    Arguments:
      seconds: of the step.
      devices: their number.
      by_cause: for kernels, for collectives, and for waiting for other devices: seconds per instruction.
      collectives: per collective, its own time, also beside kernels.
      times: per collective, how often a device executed it.
      idle_before, idle_between, idle_after: time in which a device ran nothing: before its first op, between,
        after the last.
    """

    seconds: float
    devices: int
    by_cause: tuple[ByInstruction, ByInstruction, ByInstruction] = field(default_factory=_three)
    collectives: ByInstruction = field(default_factory=lambda: defaultdict(float))
    times: Counter[str] = field(default_factory=Counter)
    idle_before: float = 0.0
    idle_between: float = 0.0
    idle_after: float = 0.0


def account(
    step: TracedStep,
    groups: Mapping[str, Sequence[Sequence[int]]],
    containers: Iterable[str] = (),
    devices: Sequence[int] = (),
) -> StepAttribution:
    """Attributes a step.

    Arguments:
      groups: per collective, the sets of devices that exchange data.
      containers: instructions whose events only surround others, such as loops.
      devices: those of the program; by default all that ran something.
    """
    around = set(containers)
    events = [e for e in step.events if e.instruction not in around]
    own = sorted(devices or {e.device for e in events})
    found = StepAttribution(step.seconds, len(own))
    arrived = arrivals(events, groups)
    by_device: dict[int, list[OpEvent]] = defaultdict(list)
    for e in events:
        by_device[e.device].append(e)
    for device in own:
        _divide(found, step, list(_intervals(by_device[device], groups, arrived)))
        for e in by_device[device]:
            if e.instruction in groups:
                found.times[e.instruction] += 1
                found.collectives[e.instruction] += max(0.0, e.end - arrived.get(e, e.start))
    return _mean(found)


def arrivals(
    events: Iterable[OpEvent], groups: Mapping[str, Sequence[Sequence[int]]]
) -> dict[OpEvent, float]:
    """Per execution of a collective, when the last device of its group reached it."""
    runs: dict[tuple[str, int], list[OpEvent]] = defaultdict(list)
    for e in events:
        if e.instruction in groups:
            runs[e.instruction, e.device].append(e)
    found: dict[OpEvent, float] = {}
    for name, listed in groups.items():
        for group in listed:
            own = [runs[name, d] for d in group if (name, d) in runs]
            if not own or len({len(r) for r in own}) > 1:
                continue  # some of it was not seen: nobody knows who waited
            for same in zip(*own, strict=True):
                last = max(e.start for e in same)
                found.update((e, min(max(last, e.start), e.end)) for e in same)
    return found


def _intervals(
    events: Iterable[OpEvent], groups: Mapping[str, object], arrived: Mapping[OpEvent, float]
) -> Iterator[Interval]:
    for e in events:
        if e.instruction not in groups:
            yield e.start, e.end, KERNEL, e.instruction
            continue
        last = arrived.get(e, e.start)
        yield e.start, last, WAITING, e.instruction
        yield last, e.end, SENDING, e.instruction


def _divide(found: StepAttribution, step: TracedStep, intervals: Sequence[Interval]) -> None:
    """Gives each instant of a device to the instructions that ran then."""
    first = min((a for a, _, _, _ in intervals), default=step.end)
    last = min(max((b for _, b, _, _ in intervals), default=step.end), step.end)
    changes = sorted(
        (min(at, step.end), sign, kind, name)
        for a, b, kind, name in intervals
        if b > a
        for at, sign in ((a, 1), (b, -1))
    )
    running: tuple[Counter[str], Counter[str], Counter[str]] = (Counter(), Counter(), Counter())
    at = step.start
    for now, sign, kind, name in [*changes, (step.end, 0, KERNEL, "")]:
        length = now - at
        if length > 0:
            active = next((k for k in (KERNEL, SENDING, WAITING) if running[k]), None)
            if active is not None:
                share = length / running[active].total()
                for own, n in running[active].items():
                    found.by_cause[active][own] += share * n
            elif at < first:
                found.idle_before += length
            elif at >= last:
                found.idle_after += length
            else:
                found.idle_between += length
        at = now
        if sign:
            running[kind][name] += sign
            if not running[kind][name]:
                del running[kind][name]


def _mean(found: StepAttribution) -> StepAttribution:
    """Sums over devices as means."""
    n = max(found.devices, 1)
    for seconds in (*found.by_cause, found.collectives):
        for name in seconds:
            seconds[name] /= n
    found.times = Counter({name: round(times / n) for name, times in found.times.items()})
    found.idle_before, found.idle_between, found.idle_after = (
        x / n for x in (found.idle_before, found.idle_between, found.idle_after)
    )
    return found
