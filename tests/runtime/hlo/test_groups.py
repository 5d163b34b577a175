"""Replica groups of HLO text, expanded to device ids in every notation and mode."""

import pytest

from sbp.runtime.hlo.groups import connected_groups, groups_of, moves_of
from sbp.runtime.hlo.parser import HloTextError, Instruction, parse

ROWS, COLUMNS = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
ALL = (tuple(range(8)),)
WRITTEN = {
    "{{0,1,2,3},{4,5,6,7}}": ROWS,
    "{}": ALL,
    "[2,4]<=[8]": ROWS,
    "[4,2]<=[2,4]T(1,0)": COLUMNS,
    "[2,4]<=[2,2,2]T(1,0,2)": ((0, 1, 4, 5), (2, 3, 6, 7)),
    "mesh['d'=2,'m'=4] {'m'}": ROWS,
    "mesh['d'=2,'m'=4] {'d'}": COLUMNS,
    "mesh['d'=2,'m'=4] {'d','m'}": ALL,
    "mesh['d'=2,'m'=4] {'m','d'}": ((0, 4, 1, 5, 2, 6, 3, 7),),
    "mesh['d'=8] {'d':(2)4}": ROWS,
    "mesh['d'=8] {'d':(1)2}": COLUMNS,
    "mesh['a'=2,'b'=4] {'a','b':(1)2}": ((0, 2, 4, 6), (1, 3, 5, 7)),
    "mesh['d'=2,'m'=4], device_ids=(0,2,1,3,4,5,6,7) {'m'}": ((0, 2, 1, 3), (4, 5, 6, 7)),
    "mesh['d'=4,'m'=2], device_ids=([2,4]T(1,0)) {'m'}": COLUMNS,
}


def instruction(line: str) -> Instruction:
    text = f"HloModule m\nENTRY %e (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n  ROOT {line}\n}}\n"
    return parse(text).computations["e"].instructions["r"]


@pytest.mark.parametrize("groups", WRITTEN)
def test_every_notation(groups: str) -> None:
    line = f"%r = f32[8] all-reduce(%p), channel_id=1, use_global_device_ids=true, replica_groups={groups}"
    assert groups_of(instruction(line), {"num_partitions": "8"}) == WRITTEN[groups]


@pytest.mark.parametrize(
    ("opcode", "attributes", "expected"),
    [
        ("all-reduce", "replica_groups={{0},{1}}", ((0,), (3,), (1,), (4,), (2,), (5,))),
        ("all-reduce", "replica_groups={{0},{1}}, channel_id=1", ((0, 1, 2), (3, 4, 5))),
        ("all-to-all", "replica_groups={{0,2}}, channel_id=1", ((0, 2), (3, 5))),
        ("all-to-all", "replica_groups={}, channel_id=1", ((0, 1, 2), (3, 4, 5))),
        ("all-gather", "replica_groups={}, channel_id=1, use_global_device_ids=true", (tuple(range(6)),)),
    ],
)
def test_two_replicas_of_three_partitions(
    opcode: str, attributes: str, expected: tuple[tuple[int, ...], ...]
) -> None:
    found = groups_of(instruction(f"%r = f32[8] {opcode}(%p), {attributes}"), HEADER)
    assert found == expected


HEADER = {"replica_count": "2", "num_partitions": "3"}


def test_an_unknown_notation_is_refused() -> None:
    line = "%r = f32[8] all-reduce(%p), channel_id=1, use_global_device_ids=true, replica_groups=@odd"
    with pytest.raises(HloTextError, match="no list, iota or mesh"):
        groups_of(instruction(line), {})


def test_moves_of_permutes_and_sends() -> None:
    permute = "%r = f32[8] collective-permute(%p), source_target_pairs={{0,1},{1,2}}"
    send = (
        "%r = (f32[8], u32[], token[]) send(%p, %p), frontend_attributes={_xla_send_recv_source_target_pairs="
    )
    assert moves_of(instruction(permute)) == ((0, 1), (1, 2))
    assert moves_of(instruction(send + '"{{3,4}}"}')) == ((3, 4),)
    assert moves_of(instruction(send + "{{3,4}}}")) == ((3, 4),)
    assert moves_of(instruction("%r = f32[8] all-reduce(%p), replica_groups={}")) is None


def test_pairs_connect_devices() -> None:
    assert sorted(connected_groups([(0, 1), (2, 1), (5, 4), (7, 7)])) == [(0, 1, 2), (4, 5), (7,)]
