"""In which order kernels run: XLA:GPU saves memory where it costs nothing, and hides collectives.

Its latency-hiding scheduler fills the time of collectives that products wait for with what nobody waits for:
the products that no other product follows, as gradients of weights are. They come last then, and what they
read stays until that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sbp.passes.physical.fusing import Fusing
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.program import Border


def turns(
    k: Kernels, elsewhere: Collection[Buffer], carried: Collection[Buffer], hiding: bool, sending: bool
) -> list[int]:
    """The turn of each kernel, and of the end; ops that are no kernels have one too.

    Arguments:
      elsewhere: tensors whose room is counted elsewhere.
      carried: tensors that the next trip of a loop goes on with.
      hiding: whether collectives are hidden at the cost of memory.
      sending: whether there are some that nobody waits for in this trip of a loop.
    """
    n = len(k.ops)
    when = [float(i) for i in range(n)]
    followed = _followed(k, carried)
    if hiding and (sending or _waits(k, followed)):
        late = _late(k, followed)
        for at, i in enumerate([*(i for i in range(n) if not late[i]), *(i for i in range(n) if late[i])]):
            when[i] = float(at)
    when.append(float(n))
    _hasten(k, when, elsewhere)
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


def _waits(k: Kernels, followed: Sequence[bool]) -> bool:
    """Whether products wait for a collective that waits for products."""
    after = [False] * len(k.ops)
    for i, op in enumerate(k.ops):
        makers = [t.maker for t in k.read[i] if t.maker >= 0]
        after[i] = any(after[m] or k.ops[m].product for m in makers)
        if op.sends and k.runs(i) and after[i] and followed[i]:
            return True
    return False


def _late(k: Kernels, followed: Sequence[bool]) -> list[bool]:
    """Per op, whether it is a product that no other one follows, or comes after such."""
    late = [False] * len(k.ops)
    for i, op in enumerate(k.ops):
        last = op.product and k.runs(i) and not followed[i] and not isinstance(op.step, Border)
        late[i] = last or any(t.maker >= 0 and late[t.maker] for t in k.read[i])
    return late


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


def _hasten(k: Kernels, when: list[float], elsewhere: Collection[Buffer]) -> None:
    """What frees more than it takes runs as soon as it can; a product has its turn."""
    for i, op in enumerate(k.ops):
        if op.product or not k.runs(i):
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
