"""The hierarchies of a number of devices: factorisations whose axes fit the levels of links."""

import itertools
import math
from collections.abc import Iterator, Sequence

MOST_AXES = 3


def hierarchies(devices: int, domains: Sequence[int], most_axes: int = MOST_AXES) -> list[tuple[int, ...]]:
    """The shapes with at most `most_axes` axes, outer to inner; shapes with fewer axes come first.

    An axis lies inside one level of links, or spans whole domains of a level: all of them, or only
    neighbours if the level has two axes. Axes of one level can be exchanged, so the larger one stands
    outside, and no two shapes have equal plans.

    Arguments:
      devices: the number of devices.
      domains: how many consecutive devices each level of links connects, the innermost first. A number that
        does not divide the devices of the next level is replaced by the largest common divisor.

    >>> hierarchies(32, [8])
    [(32,), (4, 8), (2, 16), (4, 4, 2), (2, 2, 8)]
    >>> hierarchies(8, [8], 2)
    [(8,), (4, 2)]
    """
    parts = _levels(devices, domains) or [1]
    found = set[tuple[int, ...]]()
    for cuts in itertools.product((False, True), repeat=max(0, len(parts) - 1)):
        for factors in itertools.product(*(_axes(level, most_axes) for level in _merged(parts, cuts))):
            shape = tuple(itertools.chain(*factors))
            if len(shape) <= most_axes:
                found.add(shape)
    if len(parts) > 1 and most_axes > 1:
        found.update((outer, devices // outer) for outer in range(2, parts[0]) if parts[0] % outer == 0)
    # Of as many axes, those first that are most alike: the plan of such a one is most often the best.
    return sorted(found, key=lambda shape: (len(shape), max(shape) / min(shape), shape))


def _levels(devices: int, domains: Sequence[int]) -> list[int]:
    """The number of inner domains in each level, outer to inner; their product is `devices`."""
    parts, left = list[int](), devices
    for domain in sorted(domains, reverse=True):
        inside = math.gcd(left, domain)
        parts, left = [*parts, left // inside], inside
    return [n for n in (*parts, left) if n > 1]


def _merged(parts: Sequence[int], cuts: Sequence[bool]) -> list[list[int]]:
    """Levels joined with their neighbours, except at the cuts."""
    found = [[n] for n in parts[:1]]
    for n, cut in zip(parts[1:], cuts, strict=True):
        if cut:
            found.append([n])
        else:
            found[-1].append(n)
    return found


def _axes(levels: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The possible axes of some levels: any factors of one level, or one axis over several levels."""
    if len(levels) > 1:
        return [(math.prod(levels),)]
    return [factors for n in range(1, most + 1) for factors in factorisations(levels[0], n)]


def factorisations(n: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Writes `n` as a product of so many factors of at least 2, the largest first; one factor is `n` itself.

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
