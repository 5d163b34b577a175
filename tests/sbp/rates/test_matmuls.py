"""Seconds of matrix products: at measured shapes, between, below and above them."""

import itertools

import pytest

from sbp.hardware.catalogue import hardware_for
from sbp.rates.chips import CHIPS
from sbp.rates.matmuls import (
    BELIEVED_SHARE,
    FUSED_SHARE,
    UNMEASURED_SHARE,
    VECTOR,
    fused_seconds,
    matmul_seconds,
    peak_flops,
)

H100 = CHIPS["h100"]


@pytest.mark.parametrize(("operands", "tflops"), [("bf16", 780.2), ("f32", 403.1)])
def test_the_cube_of_4096(operands: str, tflops: float) -> None:
    found = matmul_seconds(H100, 4096, 4096, 4096, operands=operands)
    assert found.source == "measured"
    assert 2 * 4096**3 / found.seconds == pytest.approx(tflops * 1e12, rel=1e-3)


def test_products_in_one_kernel_have_a_share_of_the_rate_of_large_ones() -> None:
    """However short the sums of one of the two are: the heads of an attention are 128 wide."""
    one = fused_seconds(H100, 8192, 4096, 128, batch=16).seconds
    assert one == fused_seconds(H100, 8192, 128, 4096, batch=16).seconds
    assert one == pytest.approx(matmul_seconds(H100, 4096, 4096, 4096).seconds / FUSED_SHARE, rel=0.01)
    assert hardware_for("h100").fused_seconds(16, 8192, 4096, 128, 2) == one
    plain = hardware_for("cpu")
    assert plain.fused_seconds(2, 8, 4, 16, 4) == plain.product_seconds(2, 8, 4, 16, 4)


def test_a_rate_above_the_peak_is_not_believed() -> None:
    """XLA's figure for float8 is 2,424 TFLOP/s, of a chip that can do 1,978."""
    found = matmul_seconds(H100, 4096, 4096, 4096, operands="f8")
    assert 2 * 4096**3 / found.seconds == pytest.approx(BELIEVED_SHARE * peak_flops(H100, "f8"))
    assert found.source == "scaled"


def test_above_the_table_its_rate_holds() -> None:
    once = matmul_seconds(H100, 4096, 4096, 4096)
    more = matmul_seconds(H100, 8192, 4096, 16384)
    assert more.seconds == pytest.approx(8 * once.seconds)
    assert more.source == "scaled"


@pytest.mark.parametrize("operands", ["bf16", "f32", "f8", "f64", VECTOR])
@pytest.mark.parametrize("name", CHIPS)
def test_more_of_a_dim_never_takes_less(name: str, operands: str) -> None:
    """To within the noise of the measurements: some larger shapes were a little faster."""
    for dim in range(3):
        shapes = [tuple(size if i == dim else 1024 for i in range(3)) for size in (8, 100, 300, 3000, 10000)]
        found = [matmul_seconds(CHIPS[name], *s, operands=operands).seconds for s in shapes]
        assert all(0 < a <= 1.1 * b for a, b in itertools.pairwise(found))


def test_nothing_is_faster_than_the_peak() -> None:
    for shape in itertools.product((1, 200, 4096, 70000), repeat=3):
        flops = 2.0 * shape[0] * shape[1] * shape[2]
        for operands in ("bf16", "f32", "f8"):
            seconds = matmul_seconds(H100, *shape, operands=operands).seconds
            assert flops / seconds <= peak_flops(H100, operands) * (1 + 1e-9)


def test_a_batch_fills_the_chip() -> None:
    """64 products of 256 x 256 are as many tiles as one of 2048 x 2048."""
    batched = matmul_seconds(H100, 256, 256, 1024, batch=256)
    assert batched.seconds == pytest.approx(matmul_seconds(H100, 4096, 4096, 1024).seconds)
    assert matmul_seconds(H100, 0, 256, 1024).seconds == 0


def test_chips_and_types_without_tables() -> None:
    a100 = matmul_seconds(CHIPS["a100"], 4096, 4096, 4096)
    share = peak_flops(CHIPS["a100"], "bf16") / peak_flops(H100, "bf16")
    assert a100.source == "scaled"
    assert a100.seconds == pytest.approx(matmul_seconds(H100, 4096, 4096, 4096).seconds / share)
    exact = matmul_seconds(H100, 4096, 4096, 4096, operands=VECTOR)
    assert exact.source == "formula"
    assert exact.seconds == pytest.approx(2 * 4096**3 / (H100.vector_flops * UNMEASURED_SHARE))
