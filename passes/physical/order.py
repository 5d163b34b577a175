"""In which order kernels run: XLA:GPU saves memory where it costs nothing, and hides collectives.

Its latency-hiding scheduler goes backwards, and fills the time of every collective that a product waits for
with what nobody waits for: products that no other product follows, as gradients of weights are. These run
later than they could, and what they read stays until then. So does what small reduce-scatters read, which
are sent together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

from sbp.passes.physical.combining import combined
from sbp.passes.physical.fusing import Fusing, KernelOp
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.program import Border, Box

Seconds: TypeAlias = Callable[[KernelOp], float]
"""How long an op takes."""


def turns(
    k: Kernels,
    elsewhere: Collection[Buffer],
    carried: Collection[Buffer],
    seconds: Seconds | None,
    sent: Sequence[KernelOp] = (),
) -> list[int]:
    """The turn of each kernel, and of the end; ops that are no kernels have one too.

    Arguments:
      elsewhere: tensors whose space is counted elsewhere.
      carried: tensors that the next trip of a loop goes on with.
      seconds: of an op; None where memory is short, and collectives are not hidden at its cost.
      sent: what is sent beside a trip of a loop, while nobody waits for it.
    """
    n = len(k.ops)
    when = [float(i) for i in range(n + 1)]
    together = _combine(k, when)
    if seconds is not None:
        _hide(k, when, _followed(k, carried), seconds, sent)
    _wait(k, when)
    _hasten(k, when, elsewhere, together)
    _delay(k, when, elsewhere)
    turn = [0] * (n + 1)
    for at, i in enumerate(sorted(range(n + 1), key=when.__getitem__)):
        turn[i] = at
    return turn


def _followed(k: Kernels, carried: Collection[Buffer]) -> list[bool]:
    """Per op, whether a product needs what it makes, be it in the next trip."""
    n = len(k.ops)
    followed = [False] * (n + 1)
    for i in reversed(range(n)):
        followed[i] = any(
            t in carried or any(r < n and (followed[r] or k.ops[r].product) for r in t.readers)
            for t in k.made[i]
        )
    return followed


def _combine(k: Kernels, when: list[float]) -> set[int]:
    """Puts reduce-scatters together that XLA sends as one: which these are.

    All that they read stays until the last of them has its operand. All-reduces are combined too, but are
    small where they are many, and all-gathers are counted by what they give.
    """
    makers = [[t.maker for t in read if t.maker >= 0] for read in k.read[: len(k.ops)]]
    scatters = {
        i: (op.step.move.axes, sum(t.bytes for t in k.made[i]))
        for i, op in enumerate(k.ops)
        if isinstance(op.step, Box) and op.step.move.kind == "reduce_scatter" and k.made[i]
    }
    found = set[int]()
    for members in combined(makers, scatters):
        found.update(members)
        for j in members:
            when[j] = float(members[-1])
    return found


def _hide(
    k: Kernels, when: list[float], followed: Sequence[bool], seconds: Seconds, sent: Sequence[KernelOp]
) -> None:
    """Puts products that nobody waits for beside collectives, the last ones first."""
    gaps, free = list[tuple[int, float]](), list[int]()
    after = [False] * len(k.ops)
    early = _Early(k, when)
    for i, op in enumerate(k.ops):
        makers = [t.maker for t in k.read[i] if t.maker >= 0]
        after[i] = any(after[m] or k.ops[m].product for m in makers)
        inside = isinstance(op.step, Border)
        if op.sends and k.runs(i) and after[i] and followed[i]:
            gaps.append((i, seconds(op)))
        elif op.product and k.runs(i) and not followed[i] and not inside:
            free.append(i)
    gaps.append((len(k.ops), sum(map(seconds, sent))))
    for at, left in reversed(gaps):
        while free and free[-1] > at:
            free.pop()
        while free and left > 0:
            i = free.pop()
            when[i] = float(at)
            left -= seconds(k.ops[i])
        while left > 0 and (moved := early.before(at)) is not None:
            left -= seconds(k.ops[moved])


class _Early:
    """Products of the first trips of loops that may run long before, since they need nothing that is made
    meanwhile; they hide collectives that nothing else hides, the last ones first. The very last one has its
    turn before the scheduler, which goes backwards, has come to any, as compiled programs show."""

    def __init__(self, k: Kernels, when: list[float]) -> None:
        self.k, self.when = k, when
        self.waits = [-1] * len(k.ops)  # for which op outside of the first trip
        for i, op in enumerate(k.ops):
            if op.peeled:
                makers = [t.maker for t in k.read[i] if t.maker >= 0]
                self.waits[i] = max((self.waits[m] if k.ops[m].peeled else m for m in makers), default=-1)
        self.products = [i for i, op in enumerate(k.ops) if op.peeled and op.product and k.runs(i)]
        self.is_first = True

    def before(self, at: int) -> int | None:
        """Has the last product that is ready by then run beside a collective: which one."""
        while self.products and self.products[-1] > at:
            i = self.products.pop()
            if self.waits[i] < at:
                if self.is_first:
                    self.is_first = False
                    continue
                self._move(i, float(at))
                return i
        return None

    def _move(self, i: int, at: float) -> None:
        self.when[i] = at
        for t in self.k.read[i]:
            if t.maker >= 0 and self.k.ops[t.maker].peeled and self.when[t.maker] > at:
                self._move(t.maker, at)


def _wait(k: Kernels, when: list[float]) -> None:
    """Nothing runs before what it reads is there."""
    for i in range(len(k.ops)):
        when[i] = max([when[i], *(when[t.maker] for t in k.read[i] if t.maker >= 0)])


def _delay(k: Kernels, when: list[float], elsewhere: Collection[Buffer]) -> None:
    """What is made of less than it takes is made when it is needed first."""
    for i in reversed(range(len(k.ops))):
        if k.ops[i].kind is not Fusing.LOOP or not k.made[i]:
            continue
        first = min(when[r] for t in k.made[i] for r in t.readers)
        longer = sum(
            t.bytes for t in k.read[i] if t not in elsewhere and max(when[r] for r in t.readers) < first
        )
        if first > when[i] + 1 and longer < sum(t.bytes for t in k.made[i] if t not in elsewhere):
            when[i] = first - 0.5


def _hasten(k: Kernels, when: list[float], elsewhere: Collection[Buffer], together: Collection[int]) -> None:
    """What frees more than it takes runs as soon as it can; a product has its turn, and so have collectives
    that are combined."""
    for i, op in enumerate(k.ops):
        if op.product or i in together or not k.runs(i):
            continue
        ready = max((when[t.maker] for t in k.read[i] if t.maker >= 0), default=-1.0)
        makes = sum(t.bytes for t in k.made[i] if t not in elsewhere)
        freed = sum(
            t.bytes for t in k.read[i] if t not in elsewhere and max(when[r] for r in t.readers) <= when[i]
        )
        # A reduction is merged with what makes its operand, or reads the same (multi-output fusion).
        reduces = op.kind is Fusing.ROOT and makes < sum(t.bytes for t in k.read[i])
        if ready + 1 < when[i] and (freed >= makes or reduces):
            when[i] = ready + 0.25
