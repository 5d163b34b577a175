"""What passes have moved between tiers, and how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbp.runtime.embedding.tiers.host_cache import RowSources


@dataclass(frozen=True)
class TierRates:
    """What passes have moved.

    Arguments:
      rows: of the passes, all together.
      device: that were on the devices already.
      sources: of those that came.
      written_rows: that went back to the host.
      fetch_seconds: of fetching from the disk, beside training.
      wait_seconds: that training waited for rows to be fetched.
      move_seconds: of moving rows between host and devices; training waits for it.
      passes: how many.
    """

    rows: int = 0
    device: int = 0
    sources: RowSources = field(default_factory=RowSources)
    written_rows: int = 0
    fetch_seconds: float = 0.0
    wait_seconds: float = 0.0
    move_seconds: float = 0.0
    passes: int = 0

    def __add__(self, other: TierRates) -> TierRates:
        return TierRates(**{name: x + vars(other)[name] for name, x in vars(self).items()})

    def __sub__(self, other: TierRates) -> TierRates:
        return TierRates(**{name: x - vars(other)[name] for name, x in vars(self).items()})

    def text(self, seconds: float) -> str:
        """The same in words; "" of no pass.

        Arguments:
          seconds: in which it was moved.

        >>> TierRates(rows=10, device=5, sources=RowSources(1, 3, 1), passes=2, move_seconds=0.1).text(1.0)
        '2 passes of 5 rows: 50% there, the rest 20% host, 60% disk, 20% new; 10% of the time moved'
        """
        if not self.passes:
            return ""
        found = self.sources
        came = max(1, found.host + found.disk + found.new)
        shares = f"{found.host / came:.0%} host, {found.disk / came:.0%} disk, {found.new / came:.0%} new"
        there, waits = self.device / max(1, self.rows), self.wait_seconds + self.move_seconds
        of = (
            f"{self.passes} passes of {self.rows // self.passes:,} rows: {there:.0%} there, the rest {shares}"
        )
        return f"{of}; {waits / max(seconds, 1e-9):.0%} of the time moved"
