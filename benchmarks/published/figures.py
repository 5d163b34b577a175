"""What is compared: ratios, their quantiles, ranks, and two constants as a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from benchmarks.published.chips import kind_of, peak_flops
from benchmarks.published.estimate import Estimate
from benchmarks.published.model import KEY_WIDTH, ROTARY_WIDTH, VALUE_WIDTH
from benchmarks.published.recompute import weights_of
from benchmarks.published.rows import PublishedStep

# Shares of the peak with which one would guess, knowing nothing but FLOP.
BASELINE = {"bf16": 0.43, "fp16": 0.43, "fp8": 0.36}


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row with its estimate; without one if it could not be expressed, and the reason."""

    row: PublishedStep
    estimate: Estimate | None = None
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Estimated / measured seconds."""
        assert self.estimate is not None
        return self.estimate.seconds / self.row.seconds

    def as_data(self) -> dict[str, Any]:
        """For a file."""
        found = asdict(self)
        return found | ({"ratio": self.ratio} if self.estimate else {})


def model_flops(row: PublishedStep) -> float:
    """FLOP of a step: 6 per weight that a token meets, the first embedding not counted, and causal attention.

    Nothing that is computed again counts.
    """
    dense, experts = weights_of(row)
    met = dense - row.width * row.vocabulary
    if row.experts:
        met += experts * row.experts.active // row.experts.count
    width = row.width  # of all heads, of queries with keys and of weights with values on average
    if row.latent_attention:
        width = row.heads * (KEY_WIDTH + ROTARY_WIDTH + VALUE_WIDTH) // 2
    return row.tokens * (6.0 * met + 6.0 * row.layers * width * row.sequence)


def mfu(row: PublishedStep, seconds: float) -> float:
    """The share of the peak of all chips that the model's FLOP are."""
    return model_flops(row) / (seconds * row.gpus * peak_flops(row.chip, row.precision))


def baseline_seconds(row: PublishedStep) -> float:
    """By two constants: a share of the peak each for 16 and for 8 bits."""
    return model_flops(row) / (BASELINE[row.precision] * row.gpus * peak_flops(row.chip, row.precision))


def factors(ratios: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile of how far ratios are from 1, to either side.

    >>> factors([1.0, 0.5, 2.0])
    (2.0, 2.0)
    """
    off = [max(r, 1 / r) for r in ratios]
    return median(off), float(np.quantile(off, 0.9))


def rank_correlation(outcomes: Sequence[Outcome]) -> tuple[float, dict[str, float]]:
    """Spearman's, of FLOP/s per chip estimated and measured: weighted mean, and by chip and precision."""
    groups: dict[str, list[Outcome]] = {}
    for x in outcomes:
        wide = "fp8" if x.row.precision == "fp8" else "16 bit"
        groups.setdefault(f"{kind_of(x.row.chip)} {wide}", []).append(x)
    found: dict[str, float] = {}
    total = weight = 0.0
    for name, group in sorted(groups.items()):
        if len(group) < 3:
            continue
        rates = [(mfu(x.row, x.estimate.seconds), mfu(x.row, x.row.seconds)) for x in group if x.estimate]
        found[f"{name} ({len(group)})"] = rho = float(spearmanr(rates).statistic)
        total, weight = total + rho * len(group), weight + len(group)
    return total / weight if weight else float("nan"), found


def is_plain(row: PublishedStep) -> bool:
    """A dense model without context parallelism."""
    return row.experts is None and row.layout.cp == 1 and row.layout.ep == 1


HEAD = "row model chip gpus bits layout measured_s estimated_s ratio mfu mfu_estimated".split()


def head() -> str:
    """The first lines of the table."""
    return f"| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|"


def line(x: Outcome) -> str:
    """A row of the table."""
    r = x.row
    cells = [str(r.number), r.model, r.chip, str(r.gpus), r.precision, str(r.layout), f"{r.seconds:.3f}"]
    if x.estimate is None:
        cells += ["-", "-", "-", f"not expressed: {x.reason}"]
    else:
        shares = [f"{mfu(r, seconds):.2f}" for seconds in (r.seconds, x.estimate.seconds)]
        cells += [f"{x.estimate.seconds:.3f}", f"{x.ratio:.2f}", *shares]
    return "| " + " | ".join(cells) + " |"


def summary(outcomes: Sequence[Outcome]) -> str:
    """Medians and 90th percentiles of factors, beside those of the baseline on the same rows, and ranks."""
    done = [x for x in outcomes if x.estimate is not None]
    if not done:
        return "no row was expressed"
    lines = []
    plain = [x for x in done if is_plain(x.row)]
    for name, some in (("dense, neither cp nor ep", plain), ("all", done)):
        if some:
            ours = factors([x.ratio for x in some])
            base = factors([baseline_seconds(x.row) / x.row.seconds for x in some])
            lines.append(
                f"{name}: {len(some)} rows, factor {ours[0]:.3f} median, {ours[1]:.3f} at 90 %; "
                f"two constants {base[0]:.3f}, {base[1]:.3f}"
            )
    mean, each = rank_correlation(done)
    lines.append(f"rank correlation {mean:.2f}: " + ", ".join(f"{k} {v:.2f}" for k, v in each.items()))
    return "\n".join(lines)
