"""The measured tables: what is in them, and that times never fall with size."""

import itertools
from importlib import resources

import pytest

from sbp.rates.chips import CHIPS
from sbp.rates.tables import collective_curves, matmul_rates, rise_monotonically

TABLES = {chip.tables for chip in CHIPS.values() if chip.tables}


def test_every_table_of_a_chip_has_collectives() -> None:
    assert {table for table, _, _ in collective_curves()} == TABLES
    kinds = {kind for _, kind, _ in collective_curves()}
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"}


def test_matrix_products_are_measured_at_every_power_of_two() -> None:
    sizes = [256, 512, 1024, 2048, 4096]
    assert {operands for _, operands in matmul_rates()} == {"bf16", "f32", "f8e4m3fn"}
    for rates in matmul_rates().values():
        assert set(rates) == set(itertools.product(sizes, repeat=3))


def test_the_figures_are_those_of_the_source() -> None:
    (eight,) = [c for c in collective_curves()["sm_90", "all_reduce", ""] if c.ranks == 8]
    assert eight.at(2**30) == pytest.approx(4720.9e-6)  # 227.4 GB/s
    assert matmul_rates()["sm_90", "bf16"][4096, 4096, 4096] == pytest.approx(780.19e12, rel=1e-4)


def test_time_never_falls_with_size() -> None:
    for curves in collective_curves().values():
        for curve in curves:
            assert all(a <= b for a, b in itertools.pairwise(curve.seconds))
            assert all(a < b for a, b in itertools.pairwise(curve.sizes))


def test_falls_are_merged() -> None:
    assert rise_monotonically([1, 2, 3]) == [1, 2, 3]
    assert rise_monotonically([5, 1, 1, 9]) == [1, 1, 1, 9]


def test_the_files_and_their_source_are_package_data() -> None:
    names = {path.name for path in resources.files("sbp.rates").iterdir()}
    assert {"collectives.csv", "matmuls.csv", "README.md"} <= names
