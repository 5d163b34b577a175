"""Which collective leads from which signature to which, and what it sends: from the definitions."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sbp.checker.shards import Signed, dim_of, divides, elements, is_partial, shard, spans

Kind = tuple[str, str]
"""What changes along an axis: the first letters, with "P(op)" as "X", or "Y" where XLA has no collective."""

CHANGES: Mapping[str, frozenset[Kind]] = {
    "all_gather": frozenset([("S", "B"), ("Y", "B")]),
    "all_reduce": frozenset([("P", "B"), ("X", "B")]),
    "reduce_scatter": frozenset([("P", "S")]),
    "all_to_all": frozenset([("S", "S"), ("X", "S"), ("Y", "S")]),
    "slice": frozenset([("B", "S")]),
    "fill": frozenset([("B", "P"), ("B", "X"), ("B", "Y")]),
    "keep": frozenset([("B", "X"), ("B", "Y")]),
    "embed": frozenset([("S", "P"), ("S", "X"), ("S", "Y")]),
}
"""Each move, and what it may do along each of its axes."""
COLLECTIVES = frozenset(["all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute"])
STEP_SECONDS = 1e-12
"""That every move counts, so that of equal plans the one with fewer wins."""
MOST_DEVICES = 512
"""A permute of more is not followed device by device."""


def _letter(one: str) -> str:
    return "Y" if one in ("P(and)", "P(or)", "P(xor)") else "X" if one.startswith("P(") else one[0]


def wrong_move(kind: str, axes: Sequence[int], before: Signed, after: Signed) -> Iterator[str]:
    """Why a move cannot lead from one signature to another."""
    changed = [a for a, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
    if kind == "permute":
        if any(is_partial(before[a]) or is_partial(after[a]) for a in changed):
            yield "a permute neither makes nor takes a sum"
        return
    if kind not in CHANGES:
        yield f"no move is called {kind!r}"
        return
    if sorted(axes) != changed:
        yield f"it changes axes {changed}, and says {sorted(axes)}"
        return
    if len({(before[a], after[a]) for a in axes}) != 1:
        yield "its axes change differently"
        return
    old, new = before[axes[0]], after[axes[0]]
    if (_letter(old), _letter(new)) not in CHANGES[kind] or (kind == "all_to_all" and old == new):
        yield f"{kind} does not lead from {old} to {new}"
    for nd, one in ((before, old), (after, new)):
        others = [a for a, x in enumerate(nd) if x == one and a not in axes]
        if one.startswith("S") and others and max(others) > min(axes):
            yield f"{one} of an inner axis lies inside: only the innermost splits of a dim can move"
        if is_partial(one) and any(is_partial(x) and x != one for x in nd[min(axes) :]):
            yield f"another reduction is inside {one}"


def wrong_permute(shape: Sequence[int], before: Signed, after: Signed, mesh: Sequence[int]) -> Iterator[str]:
    """Why devices cannot get their parts from each other, each whole from one that has it."""
    if not divides(shape, before, mesh) or not divides(shape, after, mesh):
        yield "a permute of parts with padding"
    elif math.prod(mesh) <= MOST_DEVICES:
        every = list(itertools.product(*map(range, mesh)))
        sums = [a for a, one in enumerate(before) if is_partial(one)]
        have = {tuple(spans(shape, before, mesh, at) + [(at[a], at[a]) for a in sums]) for at in every}
        for at in every:
            need = spans(shape, after, mesh, at)
            mine = [(at[a], at[a]) for a in sums]
            if not any(
                list(part[len(shape) :]) == mine
                and all(a <= x and y <= b for (a, b), (x, y) in zip(part, need, strict=False))
                for part in have
            ):
                yield f"no device has the whole part that the one at {at} needs"
                return


def element_bytes(kind: str, dtype: str, itemsize: float, old: str, platform: str) -> float:
    """What an element takes in a move: maxima of short floats are compared in 32 bits."""
    if kind not in ("all_reduce", "reduce_scatter"):
        return itemsize
    if dtype.startswith(("int", "uint")):
        return 4.0 if itemsize == 2 and platform == "gpu" else max(itemsize, 1.0)
    floating = dtype.startswith(("float", "bfloat"))
    return max(itemsize, 4.0) if floating and old in ("P(max)", "P(min)") else itemsize


def sent_bytes(
    kind: str, axes: Sequence[int], before: Signed, after: Signed, shape: Sequence[int], mesh: Sequence[int]
) -> float:
    """What one device sends, in elements: in a ring, or directly to each other device."""
    if kind not in COLLECTIVES:
        return 0.0
    g = math.prod(mesh[a] for a in axes)
    have, get = elements(shape, before, mesh), elements(shape, after, mesh)
    if kind == "all_reduce":
        return 2 * (g - 1) / g * have
    if kind == "all_gather":
        return float((g - 1) * have)
    if kind == "permute":
        return float(get)
    if kind == "all_to_all" and before[axes[0]].startswith("S"):
        return (g - 1) / g * have * _padded(axes, before, after, shape, mesh)
    return float((g - 1) * get)  # of a sum or a maximum, each device ends with one of g parts


def _padded(
    axes: Sequence[int], before: Signed, after: Signed, shape: Sequence[int], mesh: Sequence[int]
) -> float:
    """How much longer the dim gets that is to be split, until it divides."""
    d = dim_of(after[axes[0]])
    assert d is not None
    others = tuple(one if one == f"S({d})" and a not in axes else "B" for a, one in enumerate(before))
    size = shard(shape, others, mesh)[d]
    part = size
    for a in axes:
        part = math.ceil(part / mesh[a])
    return math.prod(mesh[a] for a in axes) * part / size if size else 0.0


class Rates:
    """What the hardware section of a plan says of time, as far as it can be told without tables."""

    def __init__(self, hardware: Mapping[str, Any], placement: Mapping[str, Any]) -> None:
        self.hardware, self.mesh = hardware, placement["shape"]
        self.ranks: list[int] = placement["ranks"]
        self.formula = not hardware["chip"] and not hardware.get("curves")

    def _per(self, amount: float, rate: float | None) -> float:
        return 0.0 if rate is None else amount / rate

    def local_seconds(self, kind: str, moved_bytes: float) -> float:
        """Of a local step: nothing where who reads it does it on the way."""
        free = kind in ("keep", "slice")
        rate = self.hardware["memory_bytes_per_second"]
        return STEP_SECONDS + (0.0 if free else self._per(moved_bytes, rate))

    def collective_seconds(self, axes: Sequence[int], sent: float) -> float:
        """Of a collective, by the link that its slowest group uses."""
        slowest = min((self._link(g) for g in self._groups(axes)), key=lambda x: _rate(x["bytes_per_second"]))
        return float(slowest["latency_seconds"]) + self._per(sent, slowest["bytes_per_second"])

    def _link(self, ranks: Sequence[int]) -> Mapping[str, Any]:
        return next(x for x in self.hardware["links"] if len({r // x["devices"] for r in ranks}) <= 1)

    def _groups(self, axes: Sequence[int]) -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, at in zip(self.ranks, itertools.product(*map(range, self.mesh)), strict=True):
            groups.setdefault(tuple(c for a, c in enumerate(at) if a not in axes), []).append(rank)
        return list(groups.values())

    def arithmetic_seconds(self, work: Mapping[str, Any]) -> tuple[float, bool]:
        """Of an op: its time, and whether it is that; else no device does it in less."""
        if "flops" in work:
            return self._per(work["flops"], self.hardware["vector_flops_per_second"]), True
        batch, m, n, k, itemsize = work["product"]
        rates = sorted(self.hardware["flops_per_second"])
        rate = next((r for size, r in rates if max(1, int(itemsize)) <= size), rates[-1][1])
        share = self.hardware["efficiency"] if not self.hardware["chip"] else 1.0
        return self._per(2.0 * batch * m * n * k, None if rate is None else rate * share), not self.hardware[
            "chip"
        ]


def _rate(x: float | None) -> float:
    return math.inf if x is None else x
