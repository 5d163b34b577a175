"""XLA's latency-hiding scheduler, on made-up ops."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from sbp.passes.physical.latency_hiding import EDGE_SECONDS, HidingOp, hidden_order, plain_order


def kernel(position: float, *makers: int, seconds: float = 1.0) -> HidingOp:
    return HidingOp(makers, seconds, False, False, position)


def collective(position: float, *makers: int, seconds: float = 1.0) -> HidingOp:
    return HidingOp(makers, seconds, True, False, position)


def begins(ops: list[HidingOp]) -> list[int]:
    return [i for i, is_begin in hidden_order(ops) if is_begin]


@pytest.mark.parametrize("seed", range(20))
def test_everything_runs_once_after_what_it_waits_for(seed: int) -> None:
    draw = random.Random(seed)
    ops = []
    for i in range(40):
        makers = tuple(sorted(draw.sample(range(i), min(i, draw.randrange(3)))))
        sends = draw.random() < 0.3
        loop = not sends and draw.random() < 0.1
        ops.append(HidingOp(makers, draw.choice([0.0, 1.0, 3.0]), sends, loop, draw.random()))
    order = hidden_order(ops)
    began = {i: at for at, (i, is_begin) in enumerate(order) if is_begin}
    ended = {i: at for at, (i, _) in enumerate(order)}
    assert sorted(began) == list(range(40)) and len(order) == 40 + sum(op.sends for op in ops)
    assert all(ended[m] < began[i] for i, op in enumerate(ops) for m in op.makers)
    plain = plain_order(ops)
    assert all(plain.index(m) < plain.index(i) for i, op in enumerate(ops) for m in op.makers)
    # One collective at a time, and no loop that sends something beside it.
    flights = [range(began[i], ended[i]) for i, op in enumerate(ops) if op.sends]
    assert len({at for f in flights for at in f}) == sum(map(len, flights))
    assert not any(began[i] in f for i, op in enumerate(ops) if op.holds_wires for f in flights)


def test_the_chain_of_collectives_comes_first() -> None:
    """Backwards: what waits for nobody runs long before, if something else leads to another collective."""
    ops = [
        collective(0),
        kernel(1, 0),
        collective(2, 1),
        kernel(3, 2),
        kernel(4),
        kernel(5, 3, 4),
    ]
    assert begins(ops) == [0, 1, 2, 4, 3, 5]


@pytest.mark.parametrize("places", [(1, 2), (2, 1)])
def test_the_length_comes_nearest_to_what_is_left(places: tuple[int, int]) -> None:
    short, fits = (kernel(at, seconds=n) for at, n in zip(places, (0.1, 0.9), strict=True))
    ops = [kernel(0), collective(3, 0, seconds=1.0), short, fits, kernel(4, 1, 2, 3)]
    assert begins(ops) == [0, 1, 2, 3, 4]


def test_one_that_waits_for_no_collective_begins_early() -> None:
    ops = [collective(0), kernel(1), kernel(2, 1), kernel(3, 0, 2)]
    assert begins(ops)[0] == 0


def test_who_feeds_a_very_short_kernel_is_not_next() -> None:
    ops = [kernel(2, seconds=1.0), kernel(3, 0, seconds=0.0), kernel(1, seconds=1.0), kernel(4, 1, 2)]
    assert begins(ops) == [0, 2, 1, 3]


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective that is waited for already, and the time at which it may begin, counted from the end."""

    op: int
    time: float


@dataclass
class Backwards:
    """The walk from the end to the beginning, op by op: what the compiled one must do.

    Arguments:
      time: since the end.
      kernels: those that may be placed, by the length of the chain of collectives behind them.
      waits: collectives that may be waited for.
    """

    ops: Sequence[HidingOp]
    time: float = 0.0
    flight: Flight | None = None
    kernels: dict[float, list[int]] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)
    out: list[tuple[int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = len(self.ops)
        self.before, self.chain = [0.0] * n, [0.0] * n
        self.readers, self.rank = [0] * n, [0] * n
        self.since = [0.0] * n  # the time from which an op may run
        for at, i in enumerate(plain_order(self.ops)):
            op = self.ops[i]
            self.rank[i] = at
            self.before[i] = max((self.chain[m] for m in op.makers), default=0.0)
            self.chain[i] = self.before[i] + (op.seconds if op.sends else 0.0)
            for m in op.makers:
                self.readers[m] += 1
        for i in range(n):
            if not self.readers[i]:
                self._ready(i)

    def run(self) -> list[tuple[int, bool]]:
        """The order, forwards."""
        while self.kernels or self.waits or self.flight:
            if self.waits and self.flight is None:
                self._wait()
            elif (i := self._next()) is not None:
                self._place(i)
            else:
                self._begin()
        return self.out[::-1]

    def _ready(self, i: int) -> None:
        if self.ops[i].sends:
            self.waits.append(i)
        else:
            self.kernels.setdefault(self.chain[i], []).append(i)

    def _wait(self) -> None:
        i = max(self.waits, key=lambda i: (self.chain[i], self.rank[i]))
        self.waits.remove(i)
        self.out.append((i, False))
        self.time = max(self.time, self.since[i])
        self.flight = Flight(i, self.time + self.ops[i].seconds)
        self.time += EDGE_SECONDS

    def _next(self) -> int | None:
        """The kernel that is next; None if the collective begins instead."""
        flight = self.flight
        left = 0.0 if flight is None else flight.time - self.time
        if flight is not None and left <= 0 and self._begins_first(flight.op):
            return None
        for chain in sorted(self.kernels, reverse=True):
            able = [i for i in self.kernels[chain] if self.since[i] <= self.time and self._is_able(i)]
            if able:
                return max(able, key=lambda i: self._worth(i, left))
        soon = [i for alike in self.kernels.values() for i in alike if self._is_able(i)]
        best = min(soon, key=lambda i: (self.since[i], -self.chain[i], -self.rank[i]), default=None)
        stalls = best is not None and flight is not None and flight.time < self.since[best]
        return None if stalls else best

    def _is_able(self, i: int) -> bool:
        return self.flight is None or not self.ops[i].holds_wires

    def _begins_first(self, i: int) -> bool:
        """Whether a collective that is hidden begins before any other kernel."""
        if self.waits:
            return True
        return self.before[i] > 0 and self.before[i] >= max(self.kernels, default=0.0)

    def _worth(self, i: int, left: float) -> tuple[float, bool, int, int]:
        op = self.ops[i]
        waste = abs(left - op.seconds) if left > 0 else 0.0
        unlocks = any(self.ops[m].sends for m in op.makers)
        frees = op.arguments + sum(self.readers[m] == 1 for m in op.makers)
        return -waste, unlocks, frees, self.rank[i]

    def _place(self, i: int) -> None:
        alike = self.kernels[self.chain[i]]
        alike.remove(i)
        if not alike:
            del self.kernels[self.chain[i]]
        self.out.append((i, True))
        began = max(self.time, self.since[i])
        self.time = began + self.ops[i].seconds
        self._release(i, began)

    def _begin(self) -> None:
        assert self.flight is not None
        i, began = self.flight.op, max(self.time, self.flight.time)
        self.out.append((i, True))
        self.time, self.flight = began + EDGE_SECONDS, None
        self._release(i, began)

    def _release(self, i: int, began: float) -> None:
        for m in self.ops[i].makers:
            self.since[m] = max(self.since[m], began + EDGE_SECONDS)
            self.readers[m] -= 1
            if not self.readers[m]:
                self._ready(m)


def drawn(draw: random.Random) -> list[HidingOp]:
    """Ops of few lengths and positions, so that much is alike and the last rules decide."""
    n, lengths = draw.randrange(1, 80), draw.choice([(0.0,), (0.0, 1.0), (0.0, 5e-7, 1.0, 3.0)])
    wide, wired = draw.choice([1, 3, 8]), draw.choice([0.0, 0.2, 0.7])
    ops = list[HidingOp]()
    for i in range(n):
        near = range(max(0, i - 12), i)
        makers = tuple(draw.sample(near, min(len(near), draw.randrange(wide + 1))))
        sends = draw.random() < wired
        loop = not sends and draw.random() < 0.1
        seconds, position = draw.choice(lengths), float(draw.randrange(8))
        ops.append(HidingOp(makers, seconds, sends, loop, position, draw.randrange(3)))
    return ops


@pytest.mark.parametrize("seed", range(200))
def test_the_compiled_walk_is_the_evident_one(seed: int) -> None:
    ops = drawn(random.Random(seed))
    assert hidden_order(ops) == Backwards(ops).run()


def test_of_nothing_nothing_happens() -> None:
    assert hidden_order([]) == []
