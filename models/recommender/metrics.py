"""AUC and log loss of a whole set that arrives in batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

CHUNK = 1 << 20


@dataclass(slots=True)
class Clicks:
    """Scores of clicks, added batch by batch; AUC and log loss are exact.

    Memory: 4 bytes a score while they are added, 8 while `auc` is computed, and 20 MB. The 89 million rows of
    the terabyte set's last day need 0.7 GB.

    >>> clicks = Clicks()
    >>> clicks.add([0, 1, 1], [-1.0, 2.0, -3.0])
    >>> clicks.auc()
    0.5
    """

    _negative: list[NDArray[np.float32]] = field(default_factory=list)
    _positive: list[NDArray[np.float32]] = field(default_factory=list)
    _loss: float = 0.0

    def add(self, label: ArrayLike, logits: ArrayLike) -> None:
        """Adds a batch.

        Arguments:
          label: 0 or 1, `[b]`.
          logits: scores before the sigmoid, `[b]`; they are kept as float32.

        Raises:
          ValueError: if the shapes differ, a label is neither 0 nor 1, or a score is not a number.
        """
        given, scores = np.asarray(label), np.asarray(logits, np.float32)
        if given.shape != scores.shape or given.ndim != 1:
            raise ValueError(f"labels {given.shape} and scores {scores.shape}: both [b]")
        positive = given == 1
        if not (positive | (given == 0)).all():
            raise ValueError("a label is neither 0 nor 1")
        if np.isnan(scores).any():
            raise ValueError(f"{np.isnan(scores).sum()} of {len(scores)} scores are not a number")
        self._positive.append(scores[positive])
        self._negative.append(scores[~positive])
        # log(1 + exp(z)) - y z, which is log(1 + exp(-z)) where y is 1: without cancellation in either case
        signed = np.where(positive, -scores, scores).astype(np.float64)
        self._loss += float(np.logaddexp(0, signed).sum())

    def __len__(self) -> int:
        return sum(map(len, self._positive)) + sum(map(len, self._negative))

    def log_loss(self) -> float:
        """The mean cross-entropy in nats.

        Raises:
          ValueError: if nothing was added.
        """
        if not len(self):
            raise ValueError("the log loss of no scores")
        return self._loss / len(self)

    def auc(self) -> float:
        """The share of pairs of a click and a non-click in which the click scores higher; ties count half.

        It is the Mann-Whitney statistic: for each click the non-clicks below it, by binary search.

        Raises:
          ValueError: if there is no pair.
        """
        negative, positive = (_sorted(part) for part in (self._negative, self._positive))
        if not len(negative) or not len(positive):
            raise ValueError(
                f"AUC of {len(positive)} clicks and {len(negative)} others: at least one of each"
            )
        twice = 0  # a Python integer: exact for any number of pairs
        for start in range(0, len(positive), CHUNK):
            chunk = positive[start : start + CHUNK]
            below = np.searchsorted(negative, chunk, "left").sum(dtype=np.int64)
            twice += int(below) + int(np.searchsorted(negative, chunk, "right").sum(dtype=np.int64))
        return twice / (2 * len(negative) * len(positive))


def _sorted(parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """All scores in order, in one array that takes the place of the parts."""
    joined = np.concatenate(parts) if parts else np.empty(0, np.float32)
    joined.sort()
    parts[:] = [joined]
    return joined


@dataclass(frozen=True, slots=True)
class Score:
    """How well held-out clicks were predicted.

    Arguments:
      auc: over the whole set.
      log_loss: mean cross-entropy in nats.
      samples: how many clicks.
    """

    auc: float
    log_loss: float
    samples: int

    @staticmethod
    def of(clicks: Clicks) -> Score:
        """The score of all that was added."""
        return Score(clicks.auc(), clicks.log_loss(), len(clicks))


def scores_table(scores: Mapping[str, Score], name: str) -> str:
    """A table of who predicted how well.

    Arguments:
      name: of the clicks.
    """
    samples = next(iter(scores.values())).samples
    lines = [f"{f'{samples:,} held-out of {name}':<44}{'AUC':>8}{'log loss':>10}"]
    lines += [f"{who:<44}{score.auc:>8.4f}{score.log_loss:>10.4f}" for who, score in scores.items()]
    return "\n".join(lines)
