"""Collectives of HLO text: over which wires, between how many devices."""

import pytest

from sbp.rates.chips import CHIPS
from sbp.rates.collectives import collective_seconds
from sbp.runtime.hlo.parser import parse
from sbp.runtime.target.events import NETWORK, NVLINK
from sbp.runtime.target.traffic import Domains, WireTraffic, traffic_of

M = 16 * 32 * 4
GLOBAL = "channel_id=1, use_global_device_ids=true"


def traffic(line: str, devices: int = 16, domain: int = 8) -> WireTraffic | None:
    text = f"""HloModule m, num_partitions={devices}
ENTRY %e (p: f32[16,32]) -> f32[16,32] {{
  %p = f32[16,32] parameter(0)
  ROOT %r = {line}
}}
"""
    module = parse(text)
    computation = module.computations["e"]
    return traffic_of(module, computation, computation.instructions["r"], Domains(domain))


@pytest.mark.parametrize(
    ("groups", "ranks", "count", "domains"),
    [
        ("[2,8]<=[16]", 8, 2, 1),
        ("[8,2]<=[2,8]T(1,0)", 2, 8, 2),
        ("[1,16]<=[16]", 16, 1, 2),
        ("mesh['host'=2,'x'=8] {'host'}", 2, 8, 2),
        ("mesh['host'=2,'x'=8] {'x'}", 8, 2, 1),
        ("{{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}", 4, 4, 1),
        ("{{6,7,8,9}}", 4, 1, 2),
    ],
)
def test_what_a_group_spans(groups: str, ranks: int, count: int, domains: int) -> None:
    found = traffic(f"f32[16,32] all-reduce(%p), {GLOBAL}, replica_groups={groups}")
    assert found == WireTraffic("all_reduce", M, ranks, count, domains, "other")
    assert found.resource == (NVLINK if domains == 1 else NETWORK)


def test_bytes_are_of_the_whole_tensor() -> None:
    gather = traffic(f"f32[128,32] all-gather(%p), {GLOBAL}, replica_groups=[2,8]<=[16], dimensions={{0}}")
    scatter = traffic(f"f32[2,32] reduce-scatter(%p), {GLOBAL}, replica_groups=[2,8]<=[16], dimensions={{0}}")
    assert gather is not None and scatter is not None
    assert (gather.kind, gather.bytes) == ("all_gather", 8 * M)
    assert (scatter.kind, scatter.bytes) == ("reduce_scatter", M)


@pytest.mark.parametrize(
    ("pairs", "pattern", "domains"),
    [
        ("{{0,1},{1,2},{2,3},{3,0}}", "ring", 1),
        ("{{0,1},{1,0},{2,3},{3,2}}", "pairs", 1),
        ("{{0,4},{1,5},{2,6},{3,7}}", "other", 1),
        ("{{0,1},{1,2},{2,3}}", "ring", 1),
        ("{{7,8},{8,9}}", "ring", 2),
        ("{{7,8},{6,9}}", "other", 2),
    ],
)
def test_patterns_of_permutes(pairs: str, pattern: str, domains: int) -> None:
    line = f"f32[16,32] collective-permute(%p), channel_id=1, source_target_pairs={pairs}"
    assert traffic(line) == WireTraffic("permute", M, 2, 1, domains, pattern)


def test_a_larger_domain_holds_more() -> None:
    line = f"f32[16,32] all-reduce(%p), {GLOBAL}, replica_groups=[1,16]<=[16]"
    inside = traffic(line, domain=72)
    assert inside is not None and inside.resource == NVLINK


def test_what_sends_nothing() -> None:
    assert traffic("f32[16,32] add(%p, %p)") is None
    assert traffic(f"f32[16,32] all-reduce(%p), {GLOBAL}, replica_groups=[16,1]<=[16]") is None


def test_timing_is_that_of_the_rates() -> None:
    found = WireTraffic("all_gather", 1 << 24, 4, 2, 1)
    assert found.timing(CHIPS["h100"]) == collective_seconds(
        CHIPS["h100"], "all_gather", 1 << 24, 4, groups=2
    )


def test_a_ragged_exchange_counts_as_a_whole_one() -> None:
    sizes = ", ".join(["%p"] * 4)
    line = f"f32[16,32] ragged-all-to-all(%p, %p, {sizes}), channel_id=1, replica_groups={{{{0,1,2,3}}}}"
    assert traffic(line) == WireTraffic("all_to_all", M, 4, 1, 1, "other")


def test_a_send_without_pairs_is_to_a_neighbour() -> None:
    assert traffic("(f32[16,32], u32[], token[]) send(%p, %p), channel_id=2") == WireTraffic(
        "permute", M, 2, 1, 1, "pairs"
    )


def test_ranks_say_which_host_a_device_is_on() -> None:
    """A placement of ranks 0, 8, 1, 9: the first two devices are on two hosts."""
    assert [Domains(8, (0, 8, 1, 9)).of(i) for i in range(4)] == [0, 1, 0, 1]
