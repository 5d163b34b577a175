"""What a schedule asks of a model: where its stages live, and how many micro-batches there are."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sbp.errors import Problem


@dataclass(frozen=True, slots=True)
class RankMap:
    """A way in which stages lie on ranks.

    Arguments:
      words: how it is described.
      position: (stage, ranks) -> the position of its rank in the order in which the model first meets the
        ranks; None if any map will do.
    """

    words: str
    position: Callable[[int, int], int] | None

    def fits(self, rank_of: tuple[int, ...]) -> bool:
        """Whether the stages lie so; the ranks may have any numbers."""
        if self.position is None:
            return True
        ranks = list(dict.fromkeys(rank_of))
        wanted = [self.position(stage, len(ranks)) for stage in range(len(rank_of))]
        return wanted == [ranks.index(rank) for rank in rank_of]

    def example(self, ranks: int, chunks: int) -> tuple[int, ...]:
        """The map of so many ranks and stages per rank.

        >>> LOOP.example(2, 2), V.example(2, 2)
        ((0, 1, 0, 1), (0, 1, 1, 0))
        """
        place = self.position or _loop
        return tuple(place(stage, ranks) for stage in range(ranks * chunks))


def _loop(stage: int, ranks: int) -> int:
    return stage % ranks


def _v(stage: int, ranks: int) -> int:
    return stage if stage < ranks else 2 * ranks - 1 - stage


ANY = RankMap("any", None)
LOOP = RankMap("loop", _loop)
V = RankMap("V", _v)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a schedule asks.

    Arguments:
      map: where the stages must live.
      least_chunks: the fewest stages per rank.
      most_chunks: the most stages per rank; None for any number.
      least_rounds: the fewest micro-batches, divided by the ranks.
      equal_rounds: whether micro-batches go in equal rounds, each at least as many as there are ranks.
    """

    map: RankMap
    least_chunks: int = 1
    most_chunks: int | None = 1
    least_rounds: int = 0
    equal_rounds: bool = False

    @property
    def chunks_text(self) -> str:
        """The stages per rank, in words."""
        if self.least_chunks == self.most_chunks:
            return str(self.least_chunks)
        return f"{self.least_chunks} or more"

    @property
    def microbatches_text(self) -> str:
        """The number of micro-batches m on p ranks, in words."""
        if self.least_rounds:
            return f"m >= {self.least_rounds}p"
        return "m < 2p, or m divides by m // p" if self.equal_rounds else "any"

    def problems(self, name: str, rank_of: tuple[int, ...], microbatches: int) -> Iterator[Problem]:
        """Why the schedule of that name does not suit; nothing if it does."""
        ranks, where = len(set(rank_of)), f"schedule {name!r}"
        if not rank_of or set(rank_of) != set(range(ranks)):
            got, legal = (
                f"stages on ranks {list(rank_of)}",
                "ranks 0, 1, ... without a hole, each with a stage",
            )
            why, fix = "ranks are counted from 0", "number the groups of devices in the order of their stages"
            yield Problem("argument", where, got, legal, why, fix)
            return
        if microbatches < 1:
            got, why = f"{microbatches} micro-batches", "there is nothing to do"
            yield Problem("argument", where, got, "1 or more", why, "set the number of micro-batches")
            return
        yield from self._map_problems(where, rank_of, ranks)
        yield from self._count_problems(where, ranks, microbatches)

    def _map_problems(self, where: str, rank_of: tuple[int, ...], ranks: int) -> Iterator[Problem]:
        chunks = len(rank_of) / ranks
        most = chunks if self.most_chunks is None else self.most_chunks
        if len(rank_of) % ranks or not self.least_chunks <= chunks <= most:
            got, legal = f"{len(rank_of)} stages on {ranks} ranks", f"{self.chunks_text} per rank"
            if self.map is not ANY:
                why = "its order is made for that many, the same on each rank"
                fix = f"{self._advice(ranks)}, or 'gpipe', which takes any number"
                yield Problem("argument", where, got, legal, why, fix)
        elif not self.map.fits(rank_of):
            legal = (
                f"a {self.map.words}: {list(self.map.example(ranks, int(chunks)))}, or the same renumbered"
            )
            why = "its order counts on that path of a micro-batch through the ranks"
            fix = "place the stages so, or take 'gpipe', which takes any placement"
            yield Problem("argument", where, f"stages on ranks {list(rank_of)}", legal, why, fix)

    def _advice(self, ranks: int) -> str:
        stages = ranks * self.least_chunks
        return (
            f"cut the model into {stages} stages"
            if self.most_chunks
            else f"a multiple of {ranks} stages, {stages} or more"
        )

    def _count_problems(self, where: str, ranks: int, microbatches: int) -> Iterator[Problem]:
        got, least = f"{microbatches} micro-batches on {ranks} ranks", self.least_rounds * ranks
        if microbatches < least:
            why = "both directions of its V must be full before forwards and backwards can overlap"
            fix = f"{least} smaller micro-batches, or 'zb-v', which takes any number on the same ranks"
            yield Problem("argument", where, got, f"{least} or more", why, fix)
        elif self.equal_rounds and microbatches % max(1, microbatches // ranks):
            near = [m for m in range(1, 2 * microbatches + ranks) if m % max(1, m // ranks) == 0]
            below, above = max(m for m in near if m < microbatches), min(m for m in near if m > microbatches)
            legal = f"equal rounds of {ranks} or more: for instance {below} or {above}"
            why = "each stage of a rank takes a whole round of micro-batches in turn"
            fix = f"{below} or {above} micro-batches, best a multiple of {ranks}"
            yield Problem("argument", where, got, legal, why, fix)
