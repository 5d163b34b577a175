"""When things ran, simulated or measured, and how much of the time is bubble."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sbp.passes.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Span:
    """One action from its start to its end, in seconds or another unit.

    The two actions of a pair have the same span; a transfer's is the time of the value on the way, and it is
    on both ranks.
    """

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each rank did what.

    Arguments:
      name: what it is called.
      spans: rank -> its spans.
    """

    name: str
    spans: tuple[tuple[Span, ...], ...]

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.spans)

    @property
    def start(self) -> float:
        """When the first action starts."""
        return min((s.start for s in self._all()), default=0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end of any rank."""
        return max((s.end for s in self._all()), default=0) - self.start

    @property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes; what runs together counts once."""
        return tuple(
            sum(end - start for start, end in _merged(self.compute_spans(r))) for r in range(self.ranks)
        )

    @property
    def bubble(self) -> tuple[float, ...]:
        """How long each rank does not compute while any rank does."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def idle(self) -> tuple[float, ...]:
        """How long each rank waits between its own first and last action."""
        return tuple(own - busy for own, busy in zip(self._own, self.busy, strict=True))

    @property
    def period(self) -> float:
        """The time of a step if each rank goes on to the next one as soon as it is through.

        Clipping by a global norm, for instance, makes all ranks wait for each other; then it is the makespan.
        """
        return max(self._own, default=0)

    @property
    def _own(self) -> list[float]:
        rows = [self.compute_spans(rank) for rank in range(self.ranks)]
        return [max(s.end for s in spans) - spans[0].start if spans else 0 for spans in rows]

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time that is bubble."""
        whole = self.makespan * self.ranks
        return sum(self.bubble) / whole if whole else 0.0

    def compute_spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank that are no transfers, by their starts."""
        return tuple(
            sorted((s for s in self.spans[rank] if s.action.computes), key=lambda s: (s.start, s.end))
        )

    def _all(self) -> Iterator[Span]:
        return (s for spans in self.spans for s in spans)


def largest_difference(a: Timeline, b: Timeline) -> float:
    """The most that an action of one timeline starts or ends before or after that of the other.

    Each begins with its first action; transfers do not count. Relative to the longer makespan.

    Raises:
      KeyError: if a rank of `a` has an action that it does not have in `b`.

    >>> from sbp.passes.schedule.actions import Kind
    >>> row = lambda end: Timeline("", ((Span(0, Action(Kind.F, 0, 0), 0, end),),))
    >>> largest_difference(row(8), row(10))
    0.2
    """
    other = {(s.rank, s.action): s for rank in range(b.ranks) for s in b.compute_spans(rank)}
    pairs = [(s, other[s.rank, s.action]) for rank in range(a.ranks) for s in a.compute_spans(rank)]
    early = [abs((s.start - a.start) - (t.start - b.start)) for s, t in pairs]
    late = [abs((s.end - a.start) - (t.end - b.start)) for s, t in pairs]
    whole = max(a.makespan, b.makespan)
    return float(max(*early, *late, 0.0) / whole) if whole else 0.0


def _merged(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Intervals that do not overlap, of spans by their starts."""
    out: list[tuple[float, float]] = []
    for s in spans:
        if out and s.start < out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], s.end))
        else:
            out.append((s.start, s.end))
    return out
