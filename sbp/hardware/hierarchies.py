"""The hierarchies that so many devices can have: factorisations that no level of links cuts across."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

MOST_AXES = 3


def hierarchies(devices: int, domains: Sequence[int], most_axes: int = MOST_AXES) -> list[tuple[int, ...]]:
    """Shapes of at most `most_axes` axes, outer to inner, the ones with fewer axes first.

    An axis lies inside one level of links, or goes over whole domains of it: over all of them, or, where that
    makes two axes, over neighbours alone. Axes of one level are exchangeable, so the larger one stands
    outside, and no two shapes have equal plans.

    Arguments:
      devices: their number.
      domains: how many consecutive devices each level of links connects, the innermost first. Where that
        does not divide the devices of the next level, the largest number that divides both takes its place.

    >>> hierarchies(32, [8])
    [(32,), (4, 8), (2, 16), (4, 4, 2), (2, 2, 8)]
    >>> hierarchies(8, [8], 2)
    [(8,), (4, 2)]
    """
    parts = _levels(devices, domains) or [1]
    found = set[tuple[int, ...]]()
    for cuts in itertools.product((False, True), repeat=max(0, len(parts) - 1)):
        for factors in itertools.product(*(_ways(level, most_axes) for level in _merged(parts, cuts))):
            shape = tuple(itertools.chain(*factors))
            if len(shape) <= most_axes:
                found.add(shape)
    if len(parts) > 1 and most_axes > 1:
        found.update((outer, devices // outer) for outer in range(2, parts[0]) if parts[0] % outer == 0)
    # Of as many axes, those first that are most alike: the plan of such a one is most often the best.
    return sorted(found, key=lambda shape: (len(shape), max(shape) / min(shape), shape))


def _levels(devices: int, domains: Sequence[int]) -> list[int]:
    """How many domains of the level inside each level has, outer to inner; their product is `devices`."""
    parts, left = list[int](), devices
    for domain in sorted(domains, reverse=True):
        inside = math.gcd(left, domain)
        parts, left = [*parts, left // inside], inside
    return [n for n in (*parts, left) if n > 1]


def _merged(parts: Sequence[int], cuts: Sequence[bool]) -> list[list[int]]:
    """Neighbouring levels together, where there is no cut between them."""
    found = [[n] for n in parts[:1]]
    for n, cut in zip(parts[1:], cuts, strict=True):
        if cut:
            found.append([n])
        else:
            found[-1].append(n)
    return found


def _ways(levels: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The axes of some levels: any factors of one level, and one axis over several."""
    if len(levels) > 1:
        return [(math.prod(levels),)]
    return [factors for n in range(1, most + 1) for factors in factorisations(levels[0], n)]


def factorisations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Ways to write `n` as a product of so many falling numbers of at least 2; one factor is `n` itself.

    >>> list(factorisations(12, 2)), list(factorisations(8, 3)), list(factorisations(7, 2))
    ([(4, 3), (6, 2)], [(2, 2, 2)], [])
    """
    if factors == 1:
        yield (n,)
        return
    for first in range(2, n // 2 + 1):
        if n % first == 0:
            for rest in factorisations(n // first, factors - 1):
                if rest[0] <= first:
                    yield first, *rest
