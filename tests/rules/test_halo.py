"""Halos: which rows each device takes, against the definition of a window; and networks split in space."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sbp.rules.halo import Extent, Halo, Window, devices, scatter, slide

Array = np.ndarray[Any, Any]
OUTSIDE, ABSENT = -1, -2
# What splits the input, the window and the output, and the hierarchy.
SPLITS = (
    ((0,), (), (0,), (2,)),
    ((0,), (), (0,), (3,)),
    ((0,), (), (0,), (8,)),
    ((0, 1), (), (0, 1), (2, 3)),
    ((0,), (0,), (), (4,)),
    ((0, 1), (1,), (0,), (2, 2)),
)


def rows_of(halo: Halo, at: tuple[int, ...], index: int) -> Array:
    """The logical rows that a device holds after the exchange."""
    base, start = halo.extent, halo.starts[index]
    found = []
    for row in range(start, start + halo.count):
        if not 0 <= row < base.size:
            found.append(OUTSIDE)
            continue
        place = base.place(row) - base.first(at)
        found.append(row if -halo.before <= place < base.local + halo.after else ABSENT)
    return np.array(found)


def windows(seed: int, cases: int) -> Iterator[tuple[Window, int, int, int]]:
    """Random windows, their taps, and sizes of input and output."""
    rng = random.Random(seed)
    while cases:
        n, k, s = rng.randint(2, 24), rng.randint(1, 8), rng.randint(1, 4)
        b, d = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
        low, high = rng.randint(-3, 6), rng.randint(-3, 6)
        m = ((n - 1) * b + 1 + low + high - (k - 1) * d - 1) // s + 1
        if m > 1:
            cases -= 1
            yield Window(s, d, b, low), k, n, m


def wanted(window: Window, taps: int, size: int, outputs: Array) -> Array:
    """The row that each output reads for each tap."""
    position = outputs[:, None] * window.stride - window.low + np.arange(taps)[None] * window.dilation
    row, rest = np.divmod(position, window.base_dilation)
    return np.where((rest == 0) & (row >= 0) & (row < size), row, OUTSIDE)


@pytest.mark.parametrize("axes", SPLITS, ids=str)
def test_every_output_reads_its_rows(axes: Any) -> None:
    *split, hierarchy = axes
    refused, tight = 0, 0
    for window, k, n, m in windows(len(str(axes)), 500):
        if split[1] and k % hierarchy[split[1][0]]:
            continue
        base, taps, out = (Extent(x, a, hierarchy) for x, a in zip((n, k, m), split, strict=True))
        found = slide(base, taps, out, window)
        if found is None:
            refused += 1
            assert window.base_dilation > 1
            continue
        s, b, (low, high) = window.stride, window.base_dilation, found.padding
        assert low >= 0 and high >= 0
        reach = (taps.local - 1) * window.dilation
        length = low + (found.halo.count - 1) * b + 1 + high
        assert (length - reach - 1) // s + 1 == out.local + found.surplus
        sent = [0, 0]
        for i, at in enumerate(devices(found.halo.axes, hierarchy)):
            have = rows_of(found.halo, at, i)
            outputs = np.arange(out.valid(at))
            local = Window(s, window.dilation, b, low)
            reads = wanted(local, taps.local, found.halo.count, outputs + found.skips[i])
            got = np.where(reads == OUTSIDE, OUTSIDE, have[reads])
            need = wanted(window, k, n, outputs + out.offset(at))[:, taps.offset(at) :][:, : taps.local]
            np.testing.assert_array_equal(got, need)
            places = [base.place(r) - base.first(at) for r in need.ravel() if r != OUTSIDE]
            sent = [max(sent[0], -min(places, default=0)), max(sent[1], max(places, default=0) + 1 - base.local)]
        assert found.halo.before >= sent[0] and found.halo.after >= sent[1]
        tight += [found.halo.before, found.halo.after] == sent
    assert tight > 50 and refused < tight


@pytest.mark.parametrize("hierarchy", [(2,), (3,), (8,), (2, 3)], ids=str)
def test_every_row_sees_its_windows(hierarchy: tuple[int, ...]) -> None:
    axes = tuple(range(len(hierarchy)))
    for window, k, n, m in windows(sum(hierarchy), 500):
        if window.base_dilation * window.dilation > 1:
            continue
        s, low = window.stride, window.low
        operand = Extent(n, axes, hierarchy)
        found = scatter(Extent(m, axes, hierarchy), operand, k, s, low)
        for i, at in enumerate(devices(axes, hierarchy)):
            sources, rows = rows_of(found.source, at, i), rows_of(found.operand, at, i)
            assert len(rows) == (len(sources) - 1) * s + k
            for row in range(operand.valid(at)):
                logical = row + operand.offset(at)
                need = [o for o in range(m) if 0 <= logical - (o * s - low) < k]
                here = row + found.starts[i] - found.padding[0]
                seen = [j for j in range(len(sources)) if 0 <= here - j * s < k and sources[j] != OUTSIDE]
                assert [sources[j] for j in seen] == need
                for j, o in zip(seen, need, strict=True):
                    whole = np.arange(o * s - low, o * s - low + k)
                    inside = np.where((whole >= 0) & (whole < n), whole, OUTSIDE)
                    np.testing.assert_array_equal(rows[j * s : j * s + k], inside)
            total = sum(found.padding) + len(rows)
            assert operand.valid(at) == 0 or 0 <= found.starts[i] <= total - operand.local
