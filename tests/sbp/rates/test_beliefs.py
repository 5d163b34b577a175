"""What XLA's scheduler believes, as `python -m benchmarks.beliefs` read it out of its log."""

from collections import Counter

import pytest

from benchmarks.beliefs import Believed, kernels, main, read, said
from benchmarks.overlap import SAVED
from sbp.rates.beliefs import (
    PARTITION,
    UNKNOWN_SECONDS,
    Product,
    believed_collective_seconds,
    believed_product_seconds,
    parts_of,
)
from sbp.rates.chips import CHIPS
from sbp.rates.collectives import KINDS, HostNetwork
from sbp.rates.tables import batched_rates, matmul_rates

FILE = SAVED.with_name("beliefs.json")
RECORDED = read(FILE)
H100 = CHIPS["h100"]


def name(x: Believed) -> str:
    return f"{x.what} {x.sizes} {x.types or x.shape} {x.axes}"


def test_there_are_all_kinds() -> None:
    found = Counter(x.what for x in RECORDED)
    assert set(found) == {"product", *KINDS} and min(found.values()) > 10
    assert {1, 2, 4, 8} <= {x.sizes[4] for x in RECORDED if x.what == "product"}
    assert {x.microseconds for x in RECORDED} & {1e6 * UNKNOWN_SECONDS}


@pytest.mark.parametrize("row", RECORDED, ids=name)
def test_ours_are_xlas(row: Believed) -> None:
    microseconds, parts = row.ours("h100")
    assert microseconds == pytest.approx(row.microseconds, rel=0.01, abs=0.01)
    assert parts == (row.sizes[4] if row.what == "product" else 1)


def product(m: int, n: int, k: int, operands: str = "bfloat16", result: str = "") -> Product:
    size = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1}
    result = result or operands
    return Product(1, m, n, k, operands, result, size[operands], size[result])


@pytest.mark.parametrize(
    ("operands", "result", "times"), [("bfloat16", "float32", 64), ("float16", "float16", 8)]
)
def test_types_without_a_table_take_longer(operands: str, result: str, times: int) -> None:
    known = believed_product_seconds("h100", product(4096, 4096, 4096))
    found = believed_product_seconds("h100", product(4096, 4096, 4096, operands, result))
    assert found == pytest.approx(times * known)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("operands", ["bfloat16", "float32", "float64", "float8_e4m3fn"])
def test_every_chip_has_some(chip: str, operands: str) -> None:
    one = product(1024, 2048, 4096, operands, "bfloat16" if operands.startswith("float8") else "")
    assert 1e-6 < believed_product_seconds(chip, one) < 1
    for kind in (*KINDS, "ragged_all_to_all"):
        for groups in ([range(4)], [range(8)], [range(16)], [range(i, 64, 8) for i in range(8)]):
            found = believed_collective_seconds(CHIPS[chip], kind, 1e7, groups)
            assert 1e-6 < found < UNKNOWN_SECONDS


def test_a_sum_is_split_only_where_tiles_are_few() -> None:
    found = {k: parts_of(H100, product(1024, 1024, k)) for k in (1024, 8192)}
    assert found == {1024: 1, 8192: 2}
    assert parts_of(H100, product(1024, 4096, 8192)) == 1
    assert parts_of(H100, product(8192, 1024, 1024)) == 1


def test_groups_of_some_devices_of_each_host_count_as_hosts() -> None:
    """Four groups, each of two devices in each of four hosts, are eight hosts of two devices to it."""
    groups = [[8 * host + 2 * i + j for host in range(4) for j in (0, 1)] for i in range(4)]
    network = HostNetwork(25e9, 6e-6, 31e-6, 45e-6, H100.memory_bytes_per_second)
    taken = believed_collective_seconds(H100, "all_gather", 16e6, groups)
    assert taken == network.ring_seconds("all_gather", 16e6, 8 * PARTITION // 4, 8)


def test_rates_of_several_products_at_once() -> None:
    for key, rates in batched_rates().items():
        batches = {b for b, *_ in rates}
        measured = key[0] in ("sm_90", "sm_100_B200") and key[1] in ("bf16", "f32")
        assert batches == ({1, 2, 4} if measured else {1})
        assert all(rates[1, m, n, k] == rate for (m, n, k), rate in matmul_rates()[key].items())
        assert len(rates) == 125 * len(batches)


LOG = """
I0000 sol_latency_estimator.cc:572] NodeCost: Matmul cost from matmul_interpolator for gemm.1: 98.944 us
I0000 sol_latency_estimator.cc:530] GetLatencyBetween: Computed collective time for all-reduce-start: 34.72 us
I0000 sol_latency_estimator.cc:525] GetLatencyBetween: Fallback to wrapped estimator due to \
ComputeCollectiveTime failure for all-gather-start.2, returning latency: 5000
"""
HLO = """
%fused.1 (p: bf16[1024,4,256], q: bf16[4,256,512]) -> f32[4,1024,512] {
  ROOT %d = f32[4,1024,512]{2,1,0} dot(%p, %q), metadata={op_name="jit(f)/case3_/dot_general"}
}
ENTRY %main () -> f32[] {
  %gemm.1 = f32[4,1024,512]{2,1,0} fusion(%a, %b), kind=kCustom, calls=%fused.1
  %other = f32[] fusion(%a), kind=kLoop, calls=%fused.2
}
"""


def test_the_log_is_read() -> None:
    assert said(LOG) == {"gemm.1": 98.944, "all-reduce-start": 34.72, "all-gather-start.2": 5000.0}
    assert list(kernels(HLO)) == [("gemm.1", 3, 4 * 1024 * 512)]


def test_what_was_recorded_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--show", str(FILE)])
    *_, last = capsys.readouterr().out.strip().splitlines()
    assert last.startswith(f"{len(RECORDED)} beliefs, apart by 0.0")
