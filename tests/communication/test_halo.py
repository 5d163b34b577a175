"""Halos: which rows each device takes, against the definition of a window; and networks split in space."""

import random
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import sbp
from sbp import B, P, S
from sbp.communication.extents import Extent, coordinates_along
from sbp.communication.halo import Halo, Window, scatter_windows, slide
from sbp.hardware.catalogue import BYTES_ONLY
from sbp.runtime.hlo.meter import read_compiled

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
    base, start, c = halo.extent, halo.starts[index], halo.extent.local
    come = set(range(c))
    for hop in halo.hops:
        end = (1 - hop.distance) * c if hop.distance > 0 else -hop.distance * c + hop.rows
        come |= set(range(end - hop.rows, end)) if hop.sent else set()

    def held(row: int) -> int:
        if not 0 <= row < base.size:
            return OUTSIDE
        return row if base.padded_position(row) - base.padded_start(at) in come else ABSENT

    return np.array([held(row) for row in range(start, start + halo.count)])


def windows(seed: int, cases: int, group: int = 1) -> Iterator[tuple[Window, int, int, int]]:
    """Random windows, their taps (a multiple of `group`), and sizes of input and output."""
    rng = random.Random(seed)
    while cases:
        n, k, s = rng.randint(2, 24), group * rng.randint(1, 8 // group), rng.randint(1, 4)
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
    refused, checked, plain = 0, 0, 0
    group = hierarchy[split[1][0]] if split[1] else 1
    for window, k, n, m in windows(len(str(axes)), 300, group):
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
        for i, at in enumerate(coordinates_along(found.halo.axes, hierarchy)):
            have = rows_of(found.halo, at, i)
            outputs = np.arange(out.valid(at))
            local = Window(s, window.dilation, b, low)
            reads = wanted(local, taps.local, found.halo.count, outputs + found.skips[i])
            got = np.where(reads == OUTSIDE, OUTSIDE, have[reads])
            need = wanted(window, k, n, outputs + out.offset(at))[:, taps.offset(at) :][:, : taps.local]
            np.testing.assert_array_equal(got, need)
            places = [base.padded_position(r) - base.padded_start(at) for r in need.ravel() if r != OUTSIDE]
            sent[0] = max(sent[0], -min(places, default=0))
            sent[1] = max(sent[1], max(places, default=0) + 1 - base.local)
        assert found.halo.before >= sent[0] and found.halo.after >= sent[1]
        checked += 1
        if window == Window(low=window.low):  # other windows may step over the last row that is sent
            assert [found.halo.before, found.halo.after] == sent
            plain += 1
    assert plain > 5 and checked > 3 * refused


@pytest.mark.parametrize("hierarchy", [(2,), (3,), (8,), (2, 3)], ids=str)
def test_every_row_sees_its_windows(hierarchy: tuple[int, ...]) -> None:
    axes = tuple(range(len(hierarchy)))
    for window, k, n, m in windows(sum(hierarchy), 300):
        if window.base_dilation * window.dilation > 1:
            continue
        s, low = window.stride, window.low
        operand = Extent(n, axes, hierarchy)
        found = scatter_windows(Extent(m, axes, hierarchy), operand, k, s, low)
        for i, at in enumerate(coordinates_along(axes, hierarchy)):
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


# Nothing but bytes counts, so that small images are split as large ones are.
SPARING = sbp.Options(hardware=BYTES_ONLY)
GRID = sbp.placement("cpu", shape=(2, 4))
LINE = sbp.placement("cpu", shape=(8,))


def conv(x: Any, w: Any, **options: Any) -> Any:
    options = {"window_strides": (1, 1), "dimension_numbers": ("NHWC", "HWIO", "NHWC"), **options}
    return lax.conv_general_dilated(x, w, padding="SAME", **options)


def test_a_network_split_in_batch_and_height() -> None:
    """Two convolutions and a pooling, forward and backward: halos, and no activation is gathered."""

    def loss(ws: Any, x: Any) -> Any:
        y = jax.nn.relu(conv(x, ws[0]))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return jnp.mean(conv(y, ws[1]) ** 2)

    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(3, 3, 4, 4)).astype(np.float32) for _ in range(2)]
    x = rng.normal(size=(2, 64, 32, 4)).astype(np.float32)
    step = jax.value_and_grad(loss)
    program = sbp.compile(step, GRID, in_sbp=([B, B], [S(0), S(1)]), options=SPARING)
    plan = program.plan(ws, x)
    halos = {c for c in plan.collectives if c.kind == "permute"}
    assert {c.shape for c in halos} == {(2, 64, 32, 4), (2, 32, 16, 4)}
    assert any("need the last row of the device before" in c.reason for c in halos)
    assert all(c.kind == "all_reduce" and c.before == (P, P) for c in plan.collectives if c not in halos)
    compiled = program.lower(ws, x).compile()
    # XLA exchanges once what forward and backward both need, and so says the plan.
    assert read_compiled(compiled).wire_bytes == pytest.approx(plan.wire_bytes, rel=0.01)
    # How XLA shares a convolution out among threads decides the order of its sums: the small ones cancel.
    for got, want in zip(jax.tree.leaves(program(ws, x)), jax.tree.leaves(step(ws, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_groups_stay_split_between_grouped_convolutions() -> None:
    """One exchange at the head, one at the tail, none between."""

    def chain(ws: Any, x: Any) -> Any:
        for i, w in enumerate(ws):
            x = conv(x, w, feature_group_count=8)
            x = sbp.annotate(x, [S(3)]) if i == 1 else jax.nn.relu(x)
        return x

    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(3, 3, 2, 16)).astype(np.float32) for _ in range(4)]
    x = rng.normal(size=(8, 4, 4, 16)).astype(np.float32)
    program = sbp.compile(chain, LINE, in_sbp=([[S(3)]] * 4, [S(0)]), out_sbp=[S(0)], options=SPARING)
    plan = program.plan(ws, x)
    ends = [(c.kind, c.before, c.after) for c in plan.collectives]
    assert ends == [("all_to_all", (S(0),), (S(3),)), ("all_to_all", (S(3),), (S(0),))]
    np.testing.assert_allclose(program(ws, x), chain(ws, x), rtol=1e-5, atol=1e-4)
