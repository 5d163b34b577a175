"""The evaluator: what a physical program takes, in seconds and bytes. Nobody else adds them up.

Seconds are serial: ops and moves one after the other. A loop of unknown length counts `WHILE_TRIPS` times in
seconds, as in the search, so that a plan and the bound of the search speak of one cost; in bytes and numbers
of collectives it counts once, as what is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from sbp.passes.boxing.links import Network
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, reads, writes
from sbp.passes.plan.cost import local_bytes, node_seconds
from sbp.passes.program.control import assumed_trips, ports, trips
from sbp.passes.program.graph import Const


@dataclass(frozen=True, slots=True)
class Executed:
    """A step of a program, bodies included.

    Arguments:
      times: how often it runs, as far as that is known.
      assumed: how often it runs where loops of unknown length count `WHILE_TRIPS` times.
      region: the bodies that it stands in, from the outside in: ids of their ops, and which body it is.
    """

    step: Step
    times: int
    assumed: int
    region: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Live:
    """A tensor that a device holds.

    Arguments:
      version: which tensor, under which signature.
      bytes: of one device's shard.
    """

    version: Version
    bytes: float


@dataclass(frozen=True)
class Evaluator:
    """What a program takes on a network."""

    physical: Physical
    network: Network

    def box_seconds(self, box: Box) -> float:
        """The time of a move, once."""
        value = self.physical.graph.values[box.value]
        return self.network.seconds(box.move, value.shape, value.dtype)

    def box_bytes(self, box: Box) -> float:
        """What one device sends in a move, once."""
        value = self.physical.graph.values[box.value]
        return self.network.wire_bytes(box.move, value.shape, value.dtype)

    def seconds_of(self, step: Step) -> float:
        """The time of a step, once; that of a loop or a branch is its steps'."""
        if isinstance(step, Box):
            return self.box_seconds(step)
        if isinstance(step, Compute):
            return node_seconds(self.physical.graph, step.node, step.strategy, self.network)
        return 0.0

    def seconds(self, steps: Iterable[Step] | None = None) -> float:
        """The time of all steps, or of some of them."""
        every = self.physical.steps if steps is None else steps
        return sum(e.assumed * self.seconds_of(e.step) for e in executed(every))

    def size(self, version: Version) -> float:
        """The bytes of one device's shard."""
        return shard_bytes(self.physical, version)

    def at_peak(self) -> list[Live]:
        """What one device holds when it holds most, the largest first.

        Arguments stay for the whole step (donation is not counted), so it is an upper estimate of XLA's.
        """
        p = self.physical
        inputs = list(zip(p.graph.inputs, p.inputs, strict=True))
        results = zip(p.graph.outputs, p.outputs, strict=True)
        kept = [*inputs, *((x, nd) for x, nd in results if not isinstance(x, Const))]
        return sorted(peak(p.steps, self.size, kept, inputs), key=lambda x: -x.bytes)

    def peak_bytes(self) -> float:
        """The most bytes that one device holds at once."""
        return sum(x.bytes for x in self.at_peak())


def shard_bytes(physical: Physical, version: Version) -> float:
    """The bytes of one device's shard of a value under a signature, padding included."""
    value = physical.graph.values[version[0]]
    return local_bytes(value.shape, value.dtype, version[1], physical.placement.shape)


def executed(
    steps: Iterable[Step], times: int = 1, assumed: int = 1, region: tuple[tuple[int, int], ...] = ()
) -> Iterator[Executed]:
    """Every step, bodies included, with how often it runs."""
    for step in steps:
        yield Executed(step, times, assumed, region)
        if isinstance(step, Border):
            inner = times * trips(step.node), assumed * assumed_trips(step.node)
            for k, body in enumerate(step.bodies):
                yield from executed(body, *inner, (*region, (step.node.id, k)))


def peak(
    steps: Sequence[Step],
    size: Callable[[Version], float],
    kept: Iterable[Version],
    held: Iterable[Version] = (),
) -> list[Live]:
    """What is held when most is: what was there at the beginning, and what steps have made and still need.

    While a loop or a branch runs, the most that one of its bodies holds is added: XLA frees what a body has
    made for itself before the next trip.

    Arguments:
      size: the bytes of a version.
      kept: versions that are needed after the last step.
      held: versions that are there before the first one.
    """
    last = {version: i for i, step in enumerate(steps) for version in (*writes(step), *reads(step))}
    last.update(dict.fromkeys(kept, len(steps)))
    there = dict.fromkeys(held)
    born: dict[Version, int] = dict.fromkeys(there, -1)
    for i, step in enumerate(steps):
        for version in writes(step):
            born.setdefault(version, i)
    # One sweep over births and deaths, not a set per step: a step of 96 layers has tens of thousands of
    # steps, and thousands of tensors alive.
    change = [0.0] * (len(steps) + 2)  # of the bytes held: what is made, less what is gone
    for version, i in born.items():
        change[max(i, 0)] += size(version)
        change[last.get(version, 0) + 1] -= size(version)
    inside = {i: _inside(x, size) for i, x in enumerate(steps) if isinstance(x, Border)}
    most, at, now = sum(map(size, there)), -1, 0.0
    for i in range(len(steps)):
        now += change[i]
        here = now + sum(x.bytes for x in inside.get(i, ()))
        if here > most:
            most, at = here, i
    found = [v for v, i in born.items() if i <= at <= last.get(v, 0)] if at >= 0 else list(there)
    return [*(Live(v, size(v)) for v in found), *inside.get(at, ())]


def _inside(step: Border, size: Callable[[Version], float]) -> list[Live]:
    """What the hungriest body of a loop or a branch holds beyond what is counted outside of it.

    What enters whole is the outer tensor, and a carried value takes the room of the last one; a slice of a
    scanned tensor is one more.
    """
    wired = list(zip(ports(step.node), step.inside, strict=True))
    slices = [(v, nd) for p, nd in wired if p.stacked for v in p.enters]
    bodies = []
    for k, body in enumerate(step.bodies):
        mine = [x for x in slices if x[0] in step.node.bodies[k].inputs]
        kept = [(x, nd) for p, nd in wired for x in p.left_by(k) if isinstance(x, int)]
        bodies.append(peak(body, size, kept, mine))
    return max(bodies, key=lambda live: sum(x.bytes for x in live), default=[])
