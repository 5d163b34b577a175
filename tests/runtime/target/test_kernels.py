"""Seconds of kernels, beside what is known of them by hand."""

import pytest

from sbp.rates.chips import CHIPS, LAUNCH_SECONDS, MEMORY_SHARE
from sbp.runtime.target.matmuls import MatrixProduct
from sbp.runtime.target.simulation import kernel_time
from sbp.runtime.target.work import Work

H100 = CHIPS["h100"]


def test_nothing_takes_no_time() -> None:
    assert kernel_time(H100, Work()).seconds == 0


def test_an_addition_of_a_gibibyte_goes_at_the_rate_of_the_memory() -> None:
    found = kernel_time(H100, Work(3 * 2**30, 2**28))
    assert found.seconds == pytest.approx(3 * 2**30 / (MEMORY_SHARE * 3352.32e9) + LAUNCH_SECONDS)
    assert found.source == "formula"


def test_a_large_product_goes_at_its_measured_rate() -> None:
    work = Work(3 * 2 * 4096**2, 0, (MatrixProduct(1, 4096, 4096, 4096, "bf16"),))
    found = kernel_time(H100, work)
    assert found.seconds == pytest.approx(2 * 4096**3 / 780.2e12 + LAUNCH_SECONDS, rel=1e-3)
    assert found.source == "measured"


def test_a_thin_product_goes_at_the_rate_of_the_memory() -> None:
    """Of 16 rows of tokens: what counts is reading the weights."""
    size = 2 * (8192 * 28672 + 16 * (8192 + 28672))
    found = kernel_time(H100, Work(size, 0, (MatrixProduct(1, 16, 28672, 8192, "bf16"),)))
    assert found.seconds == pytest.approx(found.memory_seconds + LAUNCH_SECONDS)


def test_passes_and_counts_take_their_time() -> None:
    one = kernel_time(H100, Work(1, 0, (MatrixProduct(1, 4096, 4096, 4096, "bf16"),))).matrix_seconds
    three = MatrixProduct(1, 4096, 4096, 4096, "bf16", passes=3)
    half = MatrixProduct(1, 4096, 4096, 4096, "bf16", count=0.5)
    assert kernel_time(H100, Work(1, 0, (three,))).matrix_seconds == pytest.approx(3 * one)
    assert kernel_time(H100, Work(1, 0, (half,))).matrix_seconds == pytest.approx(one / 2)


def test_dear_functions_can_be_what_takes_longest() -> None:
    found = kernel_time(H100, Work(2**20, 2**36))
    assert found.seconds == pytest.approx(found.vector_seconds + LAUNCH_SECONDS)
