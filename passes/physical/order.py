"""In which order kernels run: XLA:GPU hides collectives, and saves memory where it costs nothing.

Its latency-hiding scheduler fills the time of collectives with what nobody waits for. That are the products
that no other product follows, the gradients of weights: they come last, and what they read stays until then.
"""

from __future__ import annotations

from collections.abc import Collection

from sbp.passes.physical.fusing import Fusing
from sbp.passes.physical.kernels import Buffer, Kernels
from sbp.passes.physical.program import Border


def turns(k: Kernels, elsewhere: Collection[Buffer], carried: Collection[Buffer], hiding: bool) -> list[int]:
    """The turn of each kernel, and of the end; ops that are no kernels have one too.

    Arguments:
      elsewhere: tensors whose room is counted elsewhere.
      carried: tensors that the next trip of a loop goes on with.
      hiding: whether collectives are hidden behind products that nobody waits for.
    """
    n = len(k.ops)
    when = [float(i) for i in range(n)]
    if hiding:
        late = _late(k, carried)
        for at, i in enumerate([*(i for i in range(n) if not late[i]), *(i for i in range(n) if late[i])]):
            when[i] = float(at)
    when.append(float(n))
    _hasten(k, when, elsewhere)
    _delay(k, when, elsewhere)
    turn = [0] * (n + 1)
    for at, i in enumerate(sorted(range(n + 1), key=when.__getitem__)):
        turn[i] = at
    return turn


def _late(k: Kernels, carried: Collection[Buffer]) -> list[bool]:
    """Per op, whether it is a product that no other one follows, or comes after such."""
    n = len(k.ops)
    followed = [False] * (n + 1)
    for i in reversed(range(n)):
        followed[i] = any(
            t in carried or any(r < n and (followed[r] or k.ops[r].product) for r in t.readers)
            for t in k.made[i]
        )
    late = [False] * n
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
