"""AUC against a count of all pairs, log loss against its formula."""

import numpy as np
import pytest

from models.recommender import metrics
from models.recommender.metrics import Clicks


def pairs(label: np.ndarray, scores: np.ndarray) -> float:
    """AUC by its definition: every click against every other, ties half."""
    difference = scores[label == 1][:, None] - scores[label == 0][None, :]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def trapezoids(label: np.ndarray, scores: np.ndarray) -> float:
    """The area below the curve of true over false positive rates, a point per distinct score."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
    true, false = (np.append(0, np.cumsum(label[order] == value)[last]) for value in (1, 0))
    return float(np.trapezoid(true / true[-1], false / false[-1]))


def collected(label: np.ndarray, scores: np.ndarray, pieces: int = 1) -> Clicks:
    clicks = Clicks()
    for part in np.array_split(np.arange(len(label)), pieces):
        clicks.add(label[part], scores[part])
    return clicks


@pytest.mark.parametrize("levels", [1, 2, 10, 10**6], ids=lambda levels: f"{levels} distinct scores")
@pytest.mark.parametrize("pieces", [1, 7, 500])
@pytest.mark.parametrize("chunk", [1 << 20, 13])
def test_auc_is_that_of_all_pairs(
    levels: int, pieces: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CHUNK", chunk)
    random = np.random.default_rng(levels)
    label = (random.random(400) < 0.3).astype(np.float32)
    scores = (random.integers(0, levels, 400) / levels - 0.4 + 0.3 * label * (levels > 2)).astype(np.float32)
    clicks = collected(label, scores, pieces)
    assert len(clicks) == 400
    assert clicks.auc() == pytest.approx(pairs(label, scores), abs=1e-12)
    assert clicks.auc() == pytest.approx(trapezoids(label, scores), abs=1e-12)


def test_auc_may_be_asked_for_on_the_way() -> None:
    clicks = Clicks()
    clicks.add([1, 0], [1.0, 2.0])
    assert clicks.auc() == 0
    clicks.add([1, 0], [3.0, 0.0])
    assert clicks.auc() == 0.75


def test_auc_needs_a_pair() -> None:
    clicks = Clicks()
    for label in ([], [1, 1]):
        clicks.add(label, np.zeros(len(label)))
        with pytest.raises(
            ValueError, match=f"AUC of {len(label)} clicks and 0 others: at least one of each"
        ):
            clicks.auc()


def test_infinite_scores_are_the_best_and_the_worst() -> None:
    assert collected(np.array([1, 0, 0]), np.array([np.inf, 1e30, -np.inf])).auc() == 1


@pytest.mark.parametrize("pieces", [1, 7])
def test_log_loss_is_its_formula(pieces: int) -> None:
    random = np.random.default_rng(0)
    label, logits = random.integers(0, 2, 1000), random.normal(size=1000).astype(np.float32)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -np.mean(label * np.log(p) + (1 - label) * np.log(1 - p))
    assert collected(label, logits, pieces).log_loss() == pytest.approx(expected, rel=1e-12)


def test_log_loss_of_extreme_scores() -> None:
    """Where a probability would round to 0 or 1."""
    assert collected(np.array([0, 1]), np.array([200.0, -300.0])).log_loss() == pytest.approx(250)
    assert collected(np.array([1]), np.array([50.0])).log_loss() == pytest.approx(np.exp(-50), rel=1e-9)


@pytest.mark.parametrize(
    ("label", "scores", "complaint"),
    [
        ([0, 1], [0.0], r"labels \(2,\) and scores \(1,\)"),
        ([[0], [1]], [[0.0], [1.0]], r"labels \(2, 1\)"),
        ([0, 0.5], [0.0, 1.0], "neither 0 nor 1"),
        ([0, 1], [0.0, np.nan], "1 of 2 scores are not a number"),
    ],
)
def test_what_is_not_a_score_is_refused(label: list, scores: list, complaint: str) -> None:
    clicks = Clicks()
    with pytest.raises(ValueError, match=complaint):
        clicks.add(label, scores)
    assert len(clicks) == 0


def test_log_loss_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="the log loss of no scores"):
        Clicks().log_loss()
