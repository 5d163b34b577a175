"""The meter on HLO text that XLA on CPU never prints: async forms, other groups, shapes and loops."""

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest

from sbp.runtime.hlo.meter import MeteredCollective, read_compiled, read_hlo
from sbp.runtime.hlo.parser import HloTextError

HEADER = "HloModule m, is_scheduled=true, replica_count=1, num_partitions=8\n"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""
GLOBAL = "channel_id=1, use_global_device_ids=true"


def module(*lines: str, before: str = "") -> str:
    """An HLO module whose entry holds the parameter %p and these lines."""
    signature = "ENTRY %main (p: f32[16,32]) -> f32[16,32] {"
    body = ("%p = f32[16,32]{1,0} parameter(0)", *lines)
    return "\n".join((HEADER, ADD, before, signature, *(f"  {line}" for line in body), "}\n"))


def only(text: str) -> MeteredCollective:
    (found,) = read_hlo(text).collectives
    return found


M = 16 * 32 * 4
ASYNC = {
    "all-reduce": (
        f"%s = f32[16,32]{{1,0}} all-reduce-start(%p), {GLOBAL}, replica_groups=[2,4]<=[8], to_apply=%add",
        "ROOT %r = f32[16,32]{1,0} all-reduce-done(%s)",
        ("all_reduce", 4, M, 1.5 * M),
    ),
    "all-reduce, combined": (
        f"%s = (f32[16,32]{{1,0}}, f32[16,32]{{1,0}}) all-reduce-start(%p, /*index=1*/%p), {GLOBAL}, "
        "replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
        "ROOT %r = (f32[16,32]{1,0}, f32[16,32]{1,0}) all-reduce-done(%s)",
        ("all_reduce", 2, 2 * M, 2 * M),
    ),
    "all-gather": (
        f"%s = (f32[16,32]{{1,0}}, f32[64,32]{{1,0}}) all-gather-start(%p), {GLOBAL}, "
        "replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}",
        "ROOT %r = f32[64,32]{1,0} all-gather-done(%s)",
        ("all_gather", 4, 4 * M, 3 * M),
    ),
    "permute": (
        "%s = (f32[16,32]{1,0}, f32[16,32]{1,0}, u32[], u32[]) "
        "collective-permute-start(f32[16,32]{1,0} %p), channel_id=3, "
        "source_target_pairs={{0,1},{1,0},{2,2},{4,5}}",
        "ROOT %r = f32[16,32]{1,0} collective-permute-done(%s)",
        ("permute", 2, M, M),
    ),
    "reduce-scatter, sugar": (
        f"%s = ((f32[16,32]{{1,0}}), f32[2,32]{{1,0}}) reduce-scatter-start(%p), {GLOBAL}, "
        'replica_groups={}, dimensions={0}, to_apply=%add, async_execution_thread="parallel"',
        "%u = ((f32[16,32]{1,0}), f32[2,32]{1,0}) reduce-scatter-update(%s)\n"
        "  ROOT %r = f32[2,32]{1,0} reduce-scatter-done(%u)",
        ("reduce_scatter", 8, M, 7 / 8 * M),
    ),
    "wrapped": (
        "%s = ((f32[16,32]{1,0}), f32[16,32]{1,0}, u32[]) async-start(%p), calls=%wrapped",
        "ROOT %r = f32[16,32]{1,0} async-done(%s), calls=%wrapped",
        ("all_to_all", 4, M, 3 / 4 * M),
    ),
    "send": (
        "%s = (f32[16,32]{1,0}, u32[], token[]) send(%p, %t), channel_id=2, "
        'frontend_attributes={_xla_x="a,b",'
        '_xla_send_recv_source_target_pairs="{{0,1},{1,2}}"}',
        "%d = token[] send-done(%s), channel_id=2\n"
        "  %h = (f32[16,32], u32[], token[]) send(%p, %t), channel_id=7, is_host_transfer=true\n"
        "  ROOT %v = (f32[16,32], u32[], token[]) recv(%t), channel_id=2",
        ("send", 3, M, M),
    ),
    "send, bare pairs": (
        "%s = (f32[16,32], u32[], token[]) send(%p, %t), channel_id=2, frontend_attributes={\n"
        "    _xla_send_recv_source_target_pairs={{0,1}}\n  }, control-predecessors={%t}",
        "ROOT %d = token[] send-done(%s), channel_id=2",
        ("send", 2, M, M),
    ),
}
WRAPPED = """
%wrapped (q: f32[16,32]) -> f32[16,32] {
  %q = f32[16,32]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %x = f32[16,32]{1,0} all-to-all(%q), channel_id=1, replica_groups=[2,4]<=[8], dimensions={1}
}, execution_thread="parallel"
"""


@pytest.mark.parametrize("name", ASYNC)
def test_async_forms_count_once(name: str) -> None:
    start, done, (kind, group, payload, wire) = ASYNC[name]
    found = only(module("%t = token[] after-all()", start, done, before=WRAPPED))
    assert (found.kind, found.group_size, found.payload_bytes, found.count) == (kind, group, payload, 1)
    assert found.wire_bytes == pytest.approx(wire)


def test_ragged_all_to_all_counts_its_input_as_the_bound() -> None:
    sizes = [f"%i{k} = s64[4]{{0}} constant({{1, 2, 3, 4}})" for k in range(4)]
    line = (
        "ROOT %r = f32[16,32]{1,0} ragged-all-to-all(%p, %p, %i0, %i1, %i2, %i3), channel_id=1, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}"
    )
    assert only(module(*sizes, line)) == MeteredCollective("ragged_all_to_all", 4, M, 1, 0.75 * M, "")


GROUPS = {
    "{{0,1,2,3},{4,5,6,7}}": 4,
    "{{0,1,2},{3}}": 3,
    "{}": 8,
    "[2,4]<=[8]": 4,
    "[4,2]<=[2,4]T(1,0)": 2,
    "[2,4]<=[2,2,2]T(1,0,2)": 4,
    "mesh['d'=2,'m'=4] {'m'}": 4,
    "mesh['d'=2,'m'=4] {'d','m'}": 8,
    "mesh['d'=8] {'d':(2)4}": 4,
    "mesh['a'=2,'b'=4] {'a','b':(1)2}": 4,
    "mesh['d'=2,'m'=4], device_ids=(0,2,1,3,4,5,6,7) {'m'}": 4,
    "mesh['d'=2,'m'=4], device_ids=([4,2]T(1,0)) {'d'}": 2,
}


@pytest.mark.parametrize("groups", GROUPS)
def test_replica_groups(groups: str) -> None:
    text = module(
        f"ROOT %r = f32[16,32]{{1,0}} all-reduce(%p), replica_groups={groups}, {GLOBAL}, to_apply=%add"
    )
    assert only(text).group_size == GROUPS[groups]


@pytest.mark.parametrize(
    ("opcode", "attributes", "header", "group"),
    [
        ("all-reduce", "replica_groups={}", "replica_count=4", 4),
        ("all-reduce", "replica_groups={}, channel_id=1", "num_partitions=4", 4),
        ("all-reduce", "replica_groups={{0},{1}}, channel_id=1", "replica_count=2, num_partitions=3", 3),
        ("all-gather", "replica_groups={{0},{1}}, channel_id=1", "replica_count=2, num_partitions=3", 3),
        ("reduce-scatter", "replica_groups={{0,1}}, channel_id=1", "replica_count=2, num_partitions=3", 6),
        ("all-to-all", "replica_groups={{0,1}}, channel_id=1", "replica_count=2, num_partitions=2", 2),
        ("all-to-all", "replica_groups={}, channel_id=1", "replica_count=2, num_partitions=3", 3),
        ("all-reduce", f"replica_groups={{}}, {GLOBAL}", "replica_count=2, num_partitions=3", 6),
    ],
)
def test_group_modes(opcode: str, attributes: str, header: str, group: int) -> None:
    text = module(f"ROOT %r = f32[16,32] {opcode}(%p), {attributes}, to_apply=%add")
    assert only(text.replace("replica_count=1, num_partitions=8", header)).group_size == group


SHAPES = {
    "pred[7]": 7,
    "s4[7]{0:E(4)}": 4,
    "s4[7]{0}": 7,
    "f8e4m3fn[3,5]{1,0:T(8,128)(4,1)}": 15,
    "bf16[<=4,3]{1,0}": 24,
    "f32[]": 4,
    "c128[2]{0}": 32,
    "f64[2,2]{0,1:T(2,128)S(1)}": 32,
    "u1[16]{0:E(1)}": 2,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    line = f"ROOT %r = {shape} collective-permute(%x), channel_id=1, source_target_pairs={{{{0,1}}}}"
    assert only(module(f"%x = {shape} custom-call(%p)", line)).payload_bytes == SHAPES[shape]


def loop_text(
    start: int, bound: int, step: int, direction: str, *, swap: bool, carried: bool, config: str = ""
) -> str:
    """A while with an all-reduce in its body; the bound is a constant of the condition, or carried along."""
    state = "(s32[], s32[], f32[16,32])"
    limit = "%l = s32[] get-tuple-element(%c), index=1" if carried else f"%l = s32[] constant({bound})"
    sides = "%l, %i" if swap else "%i, %l"
    compare = (
        "%less (u: s32[], v: s32[]) -> pred[] {\n  %u = s32[] parameter(0)\n  %v = s32[] parameter(1)\n"
        + (f"  ROOT %k = pred[] compare(%u, %v), direction={direction}\n}}\n")
    )
    before = f"""{compare}
%cond (c: {state}) -> pred[] {{
  %c = {state} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  {limit}
  ROOT %k = pred[] fusion({sides}), kind=kLoop, calls=%less
}}

%body (c: {state}) -> {state} {{
  %c = {state} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %j = s32[] get-tuple-element(%c), index=1
  %x = f32[16,32]{{1,0}} get-tuple-element(%c), index=2
  %step = s32[] constant({step})
  %n = s32[] add(%step, %i)
  %y = f32[16,32]{{1,0}} all-reduce(%x), {GLOBAL}, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %t = {state} tuple(%n, %j, %y)
}}
"""
    return module(
        f"%z = s32[] constant({start})",
        f"%b = s32[] constant({bound})",
        "%bc = s32[] copy(%b)",
        f"%t = {state} tuple(%z, %bc, %p)",
        f"%w = {state} while(%t), condition=%cond, body=%body{config}",
        "ROOT %r = f32[16,32]{1,0} get-tuple-element(%w), index=2",
        before=before,
    )


HOLDS: dict[str, Callable[[int, int], bool]] = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
    "EQ": lambda a, b: a == b,
}


def simulated_trips(start: int, bound: int, step: int, holds: Callable[[int, int], bool]) -> int | None:
    """Run the loop; None where it has not ended after a thousand trips."""
    value = start
    for trips in range(1000):
        if not holds(value, bound):
            return trips
        value += step
    return None


@pytest.mark.parametrize("direction", HOLDS)
def test_trip_counts_without_a_hint_equal_a_simulation(direction: str) -> None:
    rng = np.random.default_rng(0)
    for swap, carried in itertools.product((False, True), repeat=2):
        for _ in range(25):
            start, bound, step = (int(v) for v in rng.integers([-6, -6, -3], [7, 12, 4]))
            holds = HOLDS[direction]
            ordered = (lambda a, b, h=holds: h(b, a)) if swap else holds
            trips = simulated_trips(start, bound, step, ordered)
            meter = read_hlo(loop_text(start, bound, step, direction, swap=swap, carried=carried))
            executions = sum(c.count for c in meter.collectives)
            assert executions == (1 if trips is None else trips), (start, bound, step, swap)
            assert meter.wire_bytes == executions * M
            assert bool(meter.unknown_trip_counts) == (trips is None)


@pytest.mark.parametrize(
    "config",
    [
        ', backend_config={"known_init_step":{"init":"3","step":"1"},"known_trip_count":{"n":"11"}}',
        r', backend_config="{\"known_trip_count\":{\"n\":\"11\"}}", metadata={op_name="jit(f)/while"}',
    ],
)
def test_a_stated_trip_count_wins(config: str) -> None:
    text = loop_text(0, 5, 0, "LT", swap=False, carried=False, config=config)
    assert read_hlo(text).by_kind() == {"all_reduce": (11, 11 * M)}


def test_a_condition_runs_once_more_than_its_body() -> None:
    in_condition = (
        f"%y = f32[16,32]{{1,0}} all-gather(%x), {GLOBAL}, replica_groups=[1,8]<=[8], dimensions={{0}}"
    )
    text = loop_text(0, 5, 1, "LT", swap=False, carried=False)
    first = "%i = s32[] get-tuple-element(%c), index=0\n"
    text = text.replace(
        first, f"{first}  %x = f32[16,32]{{1,0}} get-tuple-element(%c), index=2\n  {in_condition}\n", 1
    )
    assert read_hlo(text).by_kind() == {"all_gather": (6, 6 * 7 * M), "all_reduce": (5, 5 * M)}


@pytest.mark.parametrize("marked", ["while", "all-reduce"])
def test_rounds_beyond_the_plan_are_kept_apart(marked: str) -> None:
    """By the name of their loop, or by their own where a loop of one trip is gone."""
    name = 'metadata={op_name="jit(f)/jvp(sbp.row0+row1)/overflow_rounds/while"}'
    text = re.sub(rf"( {marked}\(.*)", rf"\1, {name}", loop_text(0, 7, 1, "LT", swap=False, carried=True))
    meter = read_hlo(text)
    assert (meter.collectives, meter.unknown_trip_counts) == ((), ())
    assert {c.kind for c in meter.overflow} == {"all_reduce"}
    assert meter.overflow_wire_bytes == M * meter.overflow[0].count


def test_a_computation_called_twice_counts_twice_and_sources_are_read() -> None:
    calls = """
%inner (q: f32[16,32]) -> f32[16,32] {
  %q = f32[16,32]{1,0} parameter(0)
  ROOT %x = f32[16,32]{1,0} collective-permute(%q), channel_id=1, source_target_pairs={{0,1},{1,0}},
    metadata={op_name="jit(f)/a{b, \\"c\\"}" source_file="/x/gpt.py" source_line=41}
}
"""
    meter = read_hlo(
        module(
            "%u = f32[16,32]{1,0} call(%p), to_apply=%inner",
            "ROOT %v = f32[16,32]{1,0} fusion(%u), kind=kCustom, calls=%inner",
            before=calls,
        )
    )
    assert meter.by_kind() == {"permute": (2, 2.0 * M)}
    assert {c.source for c in meter.collectives} == {'jit(f)/a{b, "c"} (gpt.py:41)'}


@pytest.mark.parametrize(
    "form", ["true_computation=%one, false_computation=%two", "branch_computations={%one, %two}"]
)
def test_a_conditional_counts_its_dearest_branch(form: str) -> None:
    branch = """
%{name} (q: f32[16,32]) -> f32[16,32] {{
  %q = f32[16,32]{{1,0}} parameter(0)
  ROOT %x = f32[16,32]{{1,0}} all-reduce(%q), channel_id=1, use_global_device_ids=true, to_apply=%add,
    replica_groups={groups}
}}
"""
    before = branch.format(name="one", groups="[4,2]<=[8]") + branch.format(name="two", groups="[1,8]<=[8]")
    text = module(
        "%c = pred[] constant(true)",
        f"ROOT %r = f32[16,32]{{1,0}} conditional(%c, %p, %p), {form}",
        before=before,
    )
    assert only(text).group_size == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {\n}\n", "no ENTRY computation"),
        (
            module("ROOT %r = f32[16,32] all-gather(%gone), replica_groups={}, channel_id=1"),
            "cannot size all-gather",
        ),
        (
            module("%x = q7[3] custom-call(%p)", "ROOT %r = q7[3] all-to-all(%x), channel_id=1"),
            "element type 'q7'",
        ),
        (module("ROOT %r = f32[16,32] call(%p), to_apply=%gone"), "'gone' is called but not in the text"),
        (
            module("ROOT %r = f32[16,32] all-reduce(%p), replica_groups=@odd, to_apply=%add"),
            "no list, iota or mesh",
        ),
        (module("ROOT %r = f32[16,32] add(%p, %p"), "never closed"),
        (module()[:-3], "'main' is never closed"),
        (module() + module(), "two HloModule headers"),
    ],
)
def test_text_that_cannot_be_metered_is_refused(text: str, words: str) -> None:
    with pytest.raises(HloTextError, match=words):
        read_hlo(text)


def test_a_backend_without_text_is_refused() -> None:
    class Mute:
        def as_text(self) -> None:
            return None

    with pytest.raises(HloTextError, match="as_text"):
        read_compiled(Mute())
