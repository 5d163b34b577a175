"""The catalogue, and which link a group of ranks talks through."""

from dataclasses import replace

import numpy as np
import pytest

from sbp.annotation import placement_in, scope_of
from sbp.errors import PlacementError
from sbp.hardware.catalogue import CATALOGUE, PLATFORMS, Link, hardware_for
from sbp.passes.boxing.links import Network
from sbp.placement import Placement, placement
from sbp.rates.chips import CHIPS
from sbp.rates.collectives import collective_seconds
from sbp.rates.matmuls import matmul_seconds

H100 = hardware_for("h100")
NVLINK, INFINIBAND = H100.links


def link_of(p: Placement, axes: tuple[int, ...]) -> Link:
    ranks, _ = Network(p, H100).group(axes)
    return H100.link(ranks)


@pytest.mark.parametrize(
    ("ranks", "link"),
    [
        (range(8), NVLINK),
        ([3], NVLINK),
        (range(120, 128), NVLINK),
        ([0, 7], NVLINK),
        ([7, 8], INFINIBAND),
        (range(4, 12), INFINIBAND),
        (range(0, 128, 8), INFINIBAND),
        (range(128), INFINIBAND),
    ],
)
def test_a_group_talks_through_the_innermost_level_that_holds_it(ranks: range, link: Link) -> None:
    assert H100.link(ranks) is link


def test_sixteen_nodes_of_eight() -> None:
    p = placement("h100", shape=(16, 8))
    assert link_of(p, (1,)) == NVLINK
    assert link_of(p, (0,)) == INFINIBAND
    assert link_of(p, (0, 1)) == INFINIBAND


def test_permuted_ranks_change_the_links() -> None:
    """The same shape with the nodes inside: now the outer axis is the fast one."""
    p = placement("h100", ranks=np.arange(128).reshape(16, 8).T.tolist())
    assert p.shape == (8, 16)
    assert link_of(p, (0,)) == NVLINK
    assert link_of(p, (1,)) == INFINIBAND
    shuffled = np.arange(128).reshape(16, 8)[:, [5, 2, 7, 0, 1, 6, 3, 4]]
    assert link_of(placement("h100", ranks=shuffled.tolist()), (1,)) == NVLINK


def test_one_slow_group_slows_its_axis() -> None:
    """Two ranks exchanged across nodes: two groups of the inner axis cross the network."""
    grid = np.arange(32).reshape(4, 8)
    grid[0, 7], grid[1, 0] = grid[1, 0], grid[0, 7]
    assert link_of(placement("h100", ranks=grid.tolist()), (1,)) == INFINIBAND


def test_an_axis_inside_a_node_of_a_three_level_hierarchy() -> None:
    p = placement("h100", shape=(4, 2, 4))
    assert [link_of(p, (a,)) == NVLINK for a in range(3)] == [False, True, True]
    assert link_of(p, (1, 2)) == NVLINK


def test_measured_rates_are_used() -> None:
    """Those of `sbp.rates`: by shape and type of products, by kind, size and group of collectives."""
    product = H100.product_seconds(1, 4096, 4096, 4096, 2)
    assert product == matmul_seconds(CHIPS["h100"], 4096, 4096, 4096).seconds
    exact = H100.product_seconds(1, 4096, 4096, 4096, 4, exact=True)
    assert exact > 4 * H100.product_seconds(1, 4096, 4096, 4096, 4) > 4 * product
    for kind, whole in (("all_reduce", 2 * 7 / 8), ("all_gather", 7 / 8), ("permute", 1.0)):
        expected = collective_seconds(CHIPS["h100"], kind, 2**26, 8 if kind != "permute" else 2).seconds
        assert H100.collective_seconds(kind, whole * 2**26, range(8)) == pytest.approx(expected), kind
    across = H100.collective_seconds("all_reduce", 2 * 127 / 128 * 2**30, range(128))
    # Each of the eight cards of a node sends an eighth of it.
    assert across < 1.5 * 2 * 2**30 / (8 * CHIPS["h100"].nic_bytes_per_second)


def test_own_figures_are_used_where_no_chip_is_named() -> None:
    own = replace(H100, chip="")
    assert own.product_seconds(2, 8, 16, 32, 2) == 2 * 2 * 8 * 16 * 32 / own.flops(2)
    for ranks, link in ((range(8), NVLINK), (range(16), INFINIBAND)):
        expected = link.latency_seconds + 1e6 / link.bytes_per_second
        assert own.collective_seconds("all_gather", 1e6, ranks) == expected


def test_the_next_larger_item_size_sets_the_rate() -> None:
    chip = replace(H100, flops_per_second=((2, 100.0), (4, 10.0)), efficiency=0.5)
    assert [chip.flops(n) for n in (1, 2, 3, 4, 8)] == [50.0, 50.0, 5.0, 5.0, 5.0]


def test_every_name_survives_a_name_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names with a hyphen too: what `sbp.on` writes into JAX's scopes, the compiler reads."""
    monkeypatch.setitem(CATALOGUE, "chip-x9", replace(CATALOGUE["h100"], name="chip-x9", platform="tpu"))
    for name in CATALOGUE:
        p = placement(name, shape=(2, 4))
        assert placement_in(f"transpose(jvp({scope_of(p)}))") == p
    platforms = [placement(k, shape=(1,)).platform for k in ("cpu", "h100", "chip-x9", "tpu")]
    assert platforms == ["cpu", "gpu", "tpu", "tpu"]


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_the_catalogue_is_consistent(name: str) -> None:
    chip = hardware_for(name)
    assert chip.name == name
    assert 0 < chip.efficiency <= 1
    rates = [rate for _, rate in sorted(chip.flops_per_second)]
    assert rates == sorted(rates, reverse=True), "wider items are never faster"
    bandwidths = [link.bytes_per_second for link in chip.links]
    assert bandwidths == sorted(bandwidths, reverse=True), "outer levels are never faster"
    assert [link.devices for link in chip.links] == sorted(link.devices for link in chip.links)
    assert chip.links[-1].devices > 1 << 40, "the last level has no limit"
    assert chip.memory_bytes_per_second > chip.links[0].bytes_per_second


def test_every_platform_that_can_be_placed_is_planned_for_or_says_why_not() -> None:
    for kind in (*CATALOGUE, *PLATFORMS):
        assert hardware_for(placement(kind, shape=(1,)).kind) in CATALOGUE.values()
    with pytest.raises(PlacementError, match="hardware"):
        hardware_for(placement("tpu", shape=(1,)).kind)
