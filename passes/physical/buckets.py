"""Buckets: small collectives of one kind leave as one, where XLA does not see to it itself.

The collective of a bias costs a rendezvous and hardly a byte. A small move waits for the first step that
needs it, and leaves with all that wait for the same group; moves whose turn is later but whose tensor is
there already are taken along, up to a limit, so that no bucket keeps much memory alive.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sbp.compat import core
from sbp.hardware.catalogue import Hardware
from sbp.passes.boxing.moves import wire_bytes
from sbp.passes.physical.program import Border, Box, Physical, Step, Version, group_by_barrier, reads, writes
from sbp.passes.plan.cost import local_bytes
from sbp.signature import Split

BucketKey: TypeAlias = tuple[Hashable, ...]

KINDS = ("all_gather", "reduce_scatter", "all_to_all")
"""What is bucketed here; XLA merges all-reduces on every platform."""


def bucket_collectives(physical: Physical, hardware: Hardware) -> Physical:
    """Brings small collectives of one kind, group and dtype together.

    A collective is small if packing it costs less than the latency that it saves.
    """
    if hardware.merges_collectives:
        return physical
    link = hardware.link(range(physical.placement.size))
    limit = link.latency_seconds * hardware.memory_bytes_per_second / 2  # packed by one read and one write
    steps, _ = _bucketed(physical, limit, physical.steps, 0)
    return replace(physical, steps=steps)


def _bucketed(
    physical: Physical, limit_bytes: float, steps: Sequence[Step], first: int
) -> tuple[tuple[Step, ...], int]:
    """The steps of one body with buckets numbered from `first`, and the next free number."""
    inner: list[Step] = []
    for step in steps:
        if isinstance(step, Border):
            bodies = []
            for body in step.bodies:
                own, first = _bucketed(physical, limit_bytes, body, first)
                bodies.append(own)
            step = replace(step, bodies=tuple(bodies))
        inner.append(step)
    queue = _Queue(_Small(physical, limit_bytes, inner), inner, first)
    return group_by_barrier(queue.run()), queue.bucket


@dataclass(frozen=True)
class _Small:
    """Which steps are small moves, by position: what those of one bucket share, and their bytes."""

    physical: Physical
    limit_bytes: float
    steps: Sequence[Step]

    def keys(self) -> dict[int, BucketKey]:
        """Per small move what those of one bucket have in common."""
        makers: dict[Version, int] = {}
        for step in self.steps:
            for version in writes(step):
                makers[version] = makers.get(version, 0) + 1
        keys: dict[int, BucketKey] = {}
        for i, step in enumerate(self.steps):
            # A version that is made twice has readers of either making: such moves stay where they are.
            if (
                isinstance(step, Box)
                and self.is_small(step)
                and all(makers.get(v, 1) == 1 for v in (*reads(step), *writes(step)))
            ):
                _, dtype = self.physical.sent_type(step)
                keys[i] = (step.move.kind, step.move.axes, str(dtype), step.owned)
        return keys

    def is_small(self, box: Box) -> bool:
        """Whether a move is a collective that is worth packing with others."""
        (shape, dtype), move = self.physical.sent_type(box), box.move
        if move.kind not in KINDS or core.is_key(dtype):
            return False
        if move.kind in ("all_gather", "all_to_all") and not isinstance(move.old, Split):
            return False
        sends = wire_bytes(move, shape, core.itemsize(dtype), self.physical.placement.shape) > 0
        return sends and self.bytes(box) <= self.limit_bytes

    def bytes(self, box: Box) -> float:
        """The larger end of a move, on one device."""
        (shape, dtype), hierarchy = self.physical.sent_type(box), self.physical.placement.shape
        ends = (box.move.before, box.move.after)
        return max(local_bytes(shape, dtype, nd, hierarchy) for nd in ends)


class _Queue:
    """Reorders the steps of one body: small moves wait, and leave together."""

    def __init__(self, small: _Small, steps: Sequence[Step], bucket: int) -> None:
        self.small, self.steps, self.bucket = small, steps, bucket
        self.keys = small.keys()
        self.of_key: dict[BucketKey, list[int]] = {}
        for i, key in self.keys.items():
            self.of_key.setdefault(key, []).append(i)
        self.missing = {v for step in steps for v in writes(step)}  # made here, but not yet
        self.waiting: dict[BucketKey, list[int]] = {}
        self.maker = {v: i for i in self.keys for v in writes(steps[i])}
        self.left: set[int] = set()
        self.out: list[Step] = []

    def run(self) -> list[Step]:
        """The steps in their new order."""
        for i, step in enumerate(self.steps):
            if i in self.left:
                continue
            for version in reads(step):
                if version in self.maker and self.maker[version] not in self.left:
                    self.leave(self.keys[self.maker[version]])
            if i in self.keys:
                self.wait(i)
            else:
                self.emit(step)
        for key in list(self.waiting):
            self.leave(key)
        return self.out

    def emit(self, step: Step) -> None:
        """Puts a step next."""
        self.out.append(step)
        self.missing.difference_update(writes(step))

    def wait(self, i: int) -> None:
        """A move joins those that wait; what would not fit leaves first."""
        key = self.keys[i]
        if self.room(self.waiting.get(key, [])) < self.bytes(i):
            self.leave(key)
        self.waiting.setdefault(key, []).append(i)

    def leave(self, key: BucketKey) -> None:
        """Sends what waits, and what has its turn later but is ready and fits."""
        going = self.waiting.pop(key)
        last = going[-1]
        for k in self.of_key[key]:
            ready = k > last and k not in self.left and not self.missing & set(reads(self.steps[k]))
            if ready and self.bytes(k) <= self.room(going):
                going.append(k)
        self.left.update(going)
        self.of_key[key] = [k for k in self.of_key[key] if k not in self.left]
        boxes = [step for k in going if isinstance(step := self.steps[k], Box)]
        if len(boxes) > 1:
            boxes = [replace(box, bucket=self.bucket) for box in boxes]
            self.bucket += 1
        for box in boxes:
            self.emit(box)

    def room(self, going: Sequence[int]) -> float:
        """Bytes that still fit into a bucket."""
        return self.small.limit_bytes - sum(self.bytes(k) for k in going)

    def bytes(self, i: int) -> float:
        """The size of the move at position `i`."""
        step = self.steps[i]
        assert isinstance(step, Box)
        return self.small.bytes(step)
