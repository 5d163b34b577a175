"""Which new keys get a row at all: those that are looked up often enough, by a sketch of fixed size."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sbp.errors import EmbeddingError
from sbp.runtime.embedding.key_index import Keys
from sbp.runtime.embedding.keys import problem

HASHES = 4
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Admission:
    """A new key gets a row when it has been looked up some times; until then it has none, as an absent id.

    The counts are those of a count-min sketch with conservative update: hashes of two keys may meet, so that
    one gets a row too early, never too late. Source: Estan and Varghese, "New Directions in Traffic
    Measurement and Accounting", 2002.

    Arguments:
      least: so many lookups, that which brings the row among them.
      slots: of the sketch, for each of four hashes; some times the keys that are new between two evictions.

    Raises:
      EmbeddingError: if these are no positive numbers, or counts do not reach so far.
    """

    least: int
    slots: int = 1 << 20

    def __post_init__(self) -> None:
        most = np.iinfo(np.uint16).max
        if not (1 <= self.least <= most and self.slots >= 1):
            legal, why = f"least of 1..{most}, slots of 1 or more", "counts are of 16 bits"
            raise EmbeddingError(problem("Admission", f"{self}", legal, why, "Admission(least=3)"))


@dataclass(frozen=True, slots=True)
class SketchUpdate:
    """What a batch adds to a sketch.

    Arguments:
      at: the slots of each key, `[HASHES, n]`.
      times: how often each key was looked up, this batch included.
      is_admitted: which keys get a row now.
    """

    at: NDArray[np.intp]
    times: NDArray[np.int64]
    is_admitted: NDArray[np.bool_]


@dataclass(slots=True)
class Sketch:
    """How often keys without a row were looked up.

    Arguments:
      admission: what it is for.
      counts: `[HASHES, slots]`; the lowest of a key's counts is not below the true one.
    """

    admission: Admission
    counts: NDArray[np.uint16] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros((HASHES, self.admission.slots), np.uint16)

    def count_batch(self, keys: Keys, counts: NDArray[np.int64]) -> SketchUpdate:
        """What a batch adds; nothing is counted yet."""
        salts = np.arange(1, HASHES + 1, dtype=np.uint64)[:, None] * np.uint64(_GOLDEN)
        at = (mix_bits(keys.view(np.uint64) ^ salts) % np.uint64(self.admission.slots)).astype(np.intp)
        times = np.minimum(self.counts[_WHICH, at].min(axis=0) + counts, np.iinfo(np.uint16).max)
        return SketchUpdate(at, times, times >= self.admission.least)

    def count(self, seen: SketchUpdate) -> None:
        """Counts a batch."""
        np.maximum.at(self.counts, (_WHICH, seen.at), seen.times.astype(np.uint16))


_WHICH = np.arange(HASHES)[:, None]


def mix_bits(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every bit depends on every other: the finaliser of SplitMix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
