"""The text of a compiled program read: whose an instruction is, what a profile calls it, and who reads it."""

from __future__ import annotations

import pytest

from sbp.runtime.hlo.parser import parse
from sbp.runtime.profile.trace_alignment import ProgramReader

TEXT = """HloModule jit_step, num_partitions=4
%fused (a: f32[8], b: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %x = f32[8]{0} add(%a, %b), metadata={op_name="jit(step)/shard_map/sbp.step1/add"}
  ROOT %y = f32[8]{0} tanh(%x), metadata={op_name="jit(step)/shard_map/sbp.step2/tanh"}
}
%other (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %sum.9 = f32[8]{0} all-to-all(%p), replica_groups=[2,2]<=[4], channel_id=2,
    use_global_device_ids=true, metadata={op_name="sbp.step4/sbp.row1/all_to_all"}
}
%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}
ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %q.1 = f32[8]{0} parameter(1)
  %fusion.1 = f32[8]{0} fusion(%p.1, %q.1), kind=kLoop, calls=%fused
  %packed = f32[8]{0} copy(%fusion.1), metadata={op_name="sbp.step3+step5/sbp.row0/concatenate"}
  %sum.3 = f32[8]{0} all-reduce(%packed), replica_groups={{0,1},{2,3}}, channel_id=1,
    use_global_device_ids=true, to_apply=%add,
    metadata={op_name="sbp.step3/sbp.row0/psum" scheduling_name="all-reduce-start"}
  %begun = ((f32[8]{0}), f32[8]{0}) async-start(%sum.3), calls=%other
  %done = f32[8]{0} async-done(%begun)
  %pair = (f32[8]{0}, f32[8]{0}) tuple(%done, %fusion.1)
  %first = f32[8]{0} get-tuple-element(%pair), index=0
  ROOT %last = f32[8]{0} copy(%first)
}
"""
READER = ProgramReader(parse(TEXT), estimates=(0.0, 1.0, 3.0, 0.0, 0.0, 0.0))


def test_a_kernel_is_of_all_that_it_has_fused() -> None:
    """In parts as the estimates are; in equal ones where nothing is estimated."""
    assert READER.shares("fusion.1") == {1: 0.25, 2: 0.75}
    assert READER.shares("packed") == {3: 0.5, 5: 0.5}
    assert READER.shares("last") == {} and READER.shares("no such instruction") == {}


def test_what_a_profile_calls_a_collective() -> None:
    assert READER.aliases == {"all-reduce-start": "sum.3", "begun": "sum.9"}


def test_readers_are_seen_through_tuples() -> None:
    assert READER.readers["done"] == ("last",)
    assert set(READER.readers["fusion.1"]) == {"packed", "last"}
    assert READER.readers["last"] == ()


@pytest.mark.parametrize(
    ("devices", "groups"), [((0, 1, 2, 3), ((0, 1), (2, 3))), ((7, 5, 2, 0), ((7, 5), (2, 0)))]
)
def test_groups_are_of_the_devices_in_the_order_of_the_mesh(
    devices: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> None:
    found = READER.groups(["sum.3", "sum.9"], devices)
    assert found == {"sum.3": groups, "sum.9": groups}
