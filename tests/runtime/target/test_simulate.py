"""Schedules by hand: what overlaps, what waits, loops, branches, and what a step adds up to."""

from collections.abc import Sequence

import pytest

from sbp.rates.chips import CHIPS, LAUNCH_SECONDS
from sbp.rates.collectives import collective_seconds
from sbp.rates.matmuls import matmul_seconds
from sbp.runtime.hlo.parser import HloTextError
from sbp.runtime.target.events import HOST, KERNELS, LOOPS, NETWORK, NVLINK, Event, Simulation
from sbp.runtime.target.simulation import HOST_BYTES_PER_SECOND, simulate

H100 = CHIPS["h100"]
X = "f32[4096,4096]{1,0}"
GLOBAL = "channel_id=1, use_global_device_ids=true, to_apply=%add"
INSIDE, ACROSS = "replica_groups=[2,8]<=[16]", "replica_groups=[8,2]<=[2,8]T(1,0)"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
SYNC = 'backend_config={"collective_backend_config":{"is_sync":true}}'
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""
BYTES = 4096 * 4096 * 4
REDUCE = collective_seconds(H100, "all_reduce", BYTES, 8, groups=2).seconds
ACROSS_REDUCE = collective_seconds(H100, "all_reduce", BYTES, 2, groups=8, domains=2).seconds
MATMUL = matmul_seconds(H100, 4096, 4096, 4096, operands="f32").seconds + LAUNCH_SECONDS


def text(lines: Sequence[str], before: str = "", scheduled: str = "true") -> str:
    body = "\n".join(f"  {line}" for line in [f"%p = {X} parameter(0)", *lines])
    header = f"HloModule m, is_scheduled={scheduled}, num_partitions=16"
    return f"{header}\n{ADD}\n{before}\nENTRY %e (p: {X}) -> {X} {{\n{body}\n}}\n"


def run(*lines: str, before: str = "") -> Simulation:
    found = simulate(text(lines, before), H100)
    # Whatever the schedule: a step is what its kernels take and what they wait.
    assert found.seconds == pytest.approx(found.kernel_seconds + found.exposed_seconds)
    return found


def named(found: Simulation, name: str) -> Event:
    (event,) = [e for e in found.events if e.instruction == name]
    return event


def test_kernels_run_one_after_another() -> None:
    found = run(f"%a = {X} dot(%p, %p), {DOT}", f"ROOT %b = {X} dot(%a, %p), {DOT}")
    assert found.seconds == pytest.approx(2 * MATMUL)
    assert found.flops == 2 * 2 * 4096**3
    assert found.mfu == pytest.approx(found.flops / found.seconds / H100.matrix_flops["f32"])
    assert [e.source for e in found.events] == ["measured", "measured"]
    assert named(found, "b").start_seconds == pytest.approx(named(found, "a").end_seconds)


def test_a_collective_hides_under_a_kernel() -> None:
    found = run(
        f"%s = {X} all-reduce-start(%p), {GLOBAL}, {INSIDE}",
        f"%a = {X} dot(%p, %p), {DOT}",
        f"%b = {X} dot(%a, %p), {DOT}",
        f"ROOT %d = {X} all-reduce-done(%s)",
    )
    assert REDUCE < 2 * MATMUL
    assert found.seconds == pytest.approx(2 * MATMUL)
    assert found.exposed_seconds == 0
    assert named(found, "s").kernels == ("a", "b")
    assert found.network_seconds == {NVLINK: pytest.approx(REDUCE)}


def test_a_collective_that_is_longer_is_exposed_by_the_rest() -> None:
    found = run(
        f"%s = {X} all-reduce-start(%p), {GLOBAL}, {ACROSS}",
        f"%a = {X} dot(%p, %p), {DOT}",
        f"ROOT %d = {X} all-reduce-done(%s)",
    )
    assert found.seconds == pytest.approx(ACROSS_REDUCE)
    assert named(found, "s").exposed_seconds == pytest.approx(ACROSS_REDUCE - MATMUL)
    assert named(found, "s").resource == NETWORK


@pytest.mark.parametrize("form", [f"all-reduce(%p), {GLOBAL}", f"all-reduce-start(%p), {GLOBAL}, {SYNC}"])
def test_a_synchronous_collective_blocks(form: str) -> None:
    found = run(f"%s = {X} {form}, {INSIDE}", f"ROOT %a = {X} dot(%p, %p), {DOT}")
    assert found.seconds == pytest.approx(REDUCE + MATMUL)
    assert found.exposed_seconds == pytest.approx(REDUCE)


def test_collectives_of_the_same_wires_wait_for_each_other() -> None:
    same, other = (
        run(
            f"%s = {X} all-reduce-start(%p), {GLOBAL}, {INSIDE}",
            f"%t = {X} all-reduce-start(%p), {GLOBAL}, {groups}",
            f"%d = {X} all-reduce-done(%s)",
            f"ROOT %f = {X} all-reduce-done(%t)",
        ).seconds
        for groups in (INSIDE, ACROSS)
    )
    assert same == pytest.approx(2 * REDUCE)
    assert other == pytest.approx(max(REDUCE, ACROSS_REDUCE))


def test_the_domain_can_be_told() -> None:
    program = text([f"ROOT %s = {X} all-reduce(%p), {GLOBAL}, {ACROSS}"])
    assert set(simulate(program, H100).network_seconds) == {NETWORK}
    assert set(simulate(program, H100, domain_devices=16).network_seconds) == {NVLINK}
    assert set(simulate(program, CHIPS["gb200"]).network_seconds) == {NVLINK}


def loop(config: str, inner: Sequence[str]) -> tuple[str, str]:
    """(computations, instruction) of a loop over (counter, array), with these lines between %x and %y."""
    state = f"(s32[], {X})"
    before = f"""
%condition (c: {state}) -> pred[] {{
  %c = {state} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(12)
  ROOT %k = pred[] compare(%i, %n), direction={"LT" if config != "unknown" else "ODD"}
}}

%body (c: {state}) -> {state} {{
  %c = {state} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = {X} get-tuple-element(%c), index=1
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
{chr(10).join(f"  {line}" for line in inner)}
  ROOT %t = {state} tuple(%j, %y)
}}
"""
    stated = config if config.startswith(",") else ""
    return before, f"%w = {state} while(%start), condition=%condition, body=%body{stated}"


STATED = ', backend_config={"known_trip_count":{"n":"12"}}'
AROUND = ("%z = s32[] constant(0)", f"%start = (s32[], {X}) tuple(%z, %p)")
LAST = f"ROOT %out = {X} get-tuple-element(%w), index=1"


def test_a_loop_takes_as_often_as_it_runs() -> None:
    before, line = loop(STATED, [f"%y = {X} dot(%x, %x), {DOT}"])
    found = run(*AROUND, line, LAST, before=before)
    assert named(found, "y").times == 12
    assert found.flops == 12 * 2 * 4096**3
    counter = named(found, "j")
    assert found.seconds == pytest.approx(12 * (MATMUL + counter.end_seconds - counter.start_seconds))
    whole = named(found, "w")
    assert (whole.resource, whole.start_seconds, whole.end_seconds) == (
        LOOPS,
        0,
        pytest.approx(found.seconds),
    )


def test_where_xla_has_not_counted_the_condition_runs() -> None:
    before, line = loop("counted here", [f"%y = {X} dot(%x, %x), {DOT}"])
    found = run(*AROUND, line, LAST, before=before)
    assert (named(found, "y").times, named(found, "k").times) == (12, 13)
    assert found.unknown_trip_counts == ()


def test_an_unknown_loop_counts_once_and_is_named() -> None:
    before, line = loop("unknown", [f"%y = {X} dot(%x, %x), {DOT}"])
    found = run(*AROUND, line, LAST, before=before)
    assert found.unknown_trip_counts == ("w",)
    assert named(found, "y").times == 1


def test_rounds_for_more_keys_than_planned_do_not_run() -> None:
    before, line = loop("unknown", [f"%y = {X} dot(%x, %x), {DOT}"])
    line += ', metadata={op_name="jit(f)/overflow_rounds/while"}'
    found = run(*AROUND, line, LAST, before=before)
    assert found.unknown_trip_counts == ()
    assert found.flops == 0


def test_a_loop_reaches_its_steady_state() -> None:
    """The wires are still busy with the last trip's collective in every trip but the first."""
    inner = [
        f"%s = {X} all-reduce-start(%x), {GLOBAL}, {ACROSS}",
        f"%a = {X} dot(%x, %x), {DOT}",
        f"%y = {X} all-reduce-done(%s)",
    ]
    before, line = loop(STATED, inner)
    begun = f"%early = {X} all-reduce-start(%p), {GLOBAL}, {ACROSS}"
    found = run(*AROUND, begun, line, f"%d = {X} all-reduce-done(%early)", LAST, before=before)
    counter = named(found, "j")
    each = max(ACROSS_REDUCE, MATMUL) + counter.end_seconds - counter.start_seconds
    assert found.seconds == pytest.approx(ACROSS_REDUCE + 12 * each - (each - ACROSS_REDUCE))
    assert named(found, "s").times == 12
    assert named(found, "s").kernels == ("a",)


def test_a_loop_in_a_loop() -> None:
    before, line = loop(STATED, [f"%y = {X} dot(%x, %x), {DOT}"])
    outer = before.replace("%condition", "%outer_condition").replace("%body", "%outer_body")
    outer = outer.replace(
        f"%y = {X} dot(%x, %x), {DOT}",
        "\n".join(
            [
                f"%inner = (s32[], {X}) tuple(%i, %x)",
                f"  %v = (s32[], {X}) while(%inner), condition=%condition, body=%body{STATED}",
                f"  %y = {X} get-tuple-element(%v), index=1",
            ]
        ),
    )
    line = line.replace("%condition", "%outer_condition").replace("%body", "%outer_body")
    found = run(*AROUND, line, LAST, before=before + outer)
    assert found.flops == 144 * 2 * 4096**3
    assert named(found, "v").times == 12
    assert [e.times for e in found.events if e.instruction == "j"] == [12, 144]


def test_a_conditional_takes_its_longest_branch() -> None:
    branch = "%{name} (q: {x}) -> {x} {{\n  %q = {x} parameter(0)\n  ROOT %{name}_r = {x} {line}\n}}\n"
    before = branch.format(name="one", x=X, line="negate(%q)")
    before += branch.format(name="two", x=X, line=f"dot(%q, %q), {DOT}")
    found = run(
        "%c = pred[] constant(true)",
        f"ROOT %r = {X} conditional(%c, %p, %p), true_computation=%one, false_computation=%two",
        before=before,
    )
    assert [e.instruction for e in found.events] == ["two_r"]
    assert found.seconds == pytest.approx(MATMUL)


def test_wrapped_and_called_computations() -> None:
    before = f"""
%wrapped (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  ROOT %inner = {X} all-to-all(%q), channel_id=1, {INSIDE}, dimensions={{1}}
}}, execution_thread="parallel"

%called (q: {X}) -> {X} {{
  %q = {X} parameter(0)
  ROOT %a = {X} dot(%q, %q), {DOT}
}}
"""
    found = run(
        f"%s = (({X}), {X}, u32[]) async-start(%p), calls=%wrapped",
        f"%u = {X} call(%p), to_apply=%called",
        f"ROOT %d = {X} async-done(%s), calls=%wrapped",
        before=before,
    )
    assert named(found, "inner").resource == NVLINK
    assert named(found, "inner").kernels == ("a",)
    assert found.seconds == pytest.approx(MATMUL)


def test_sends_and_receives() -> None:
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,1},{1,2}}}"
    found = run(
        "%t = token[] after-all()",
        f"%r = ({X}, u32[], token[]) recv(%t), channel_id=2",
        f"%s = ({X}, u32[], token[]) send(%p, %t), channel_id=2, {pairs}",
        f"%a = {X} negate(%p)",
        f"%rd = ({X}, token[]) recv-done(%r), channel_id=2",
        "%sd = token[] send-done(%s), channel_id=2",
        f"ROOT %o = {X} get-tuple-element(%rd), index=0",
    )
    permute = collective_seconds(H100, "permute", BYTES, 2, pattern="ring").seconds
    assert named(found, "s").kernels == ("a",)
    assert found.seconds == pytest.approx(permute)


def test_copies_to_the_host_have_their_own_wires() -> None:
    host = "f32[4096,4096]{1,0:S(5)}"
    found = run(
        f"%s = ({host}, {X}, u32[]) copy-start(%p)",
        f"%a = {X} dot(%p, %p), {DOT}",
        f"%d = {host} copy-done(%s)",
        f"%i = ({X}, {X}, u32[]) copy-start(%a)",
        f"ROOT %j = {X} copy-done(%i)",
    )
    assert named(found, "s").resource == HOST
    assert named(found, "s").end_seconds == pytest.approx(BYTES / HOST_BYTES_PER_SECOND, rel=1e-3)
    assert named(found, "i").resource == KERNELS


def test_groups_of_one_take_no_time() -> None:
    found = run(f"ROOT %s = {X} all-reduce(%p), {GLOBAL}, replica_groups=[16,1]<=[16]")
    assert (found.seconds, found.events, found.mfu) == (0, (), 0)


def test_unknown_library_calls_are_named() -> None:
    found = run(f'ROOT %s = {X} custom-call(%p), custom_call_target="mine"')
    assert found.unknown_kernels == ("s",)


def test_what_has_begun_and_is_not_waited_for_still_ends() -> None:
    found = simulate(text([f"ROOT %s = {X} all-reduce-start(%p), {GLOBAL}, {INSIDE}"]), H100)
    assert found.seconds == pytest.approx(REDUCE)


class XlaExecutable:
    def __init__(self, hlo: str | None) -> None:
        self.hlo = hlo

    def as_text(self) -> str | None:
        return self.hlo


def test_a_compiled_program_or_its_text() -> None:
    program = text([f"ROOT %a = {X} dot(%p, %p), {DOT}"])
    assert simulate(XlaExecutable(program), H100) == simulate(program, H100)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("module @jit_f {}", "no scheduled HLO module"),
        (text([f"ROOT %a = {X} dot(%p, %p), {DOT}"], scheduled="false"), "no scheduled HLO module"),
        (text([f"ROOT %a = {X} call(%p), to_apply=%gone"]), "'gone' is called but not in the text"),
        (XlaExecutable(None), "prints no HLO"),
    ],
)
def test_what_cannot_be_simulated(program: str | XlaExecutable, words: str) -> None:
    with pytest.raises(HloTextError, match=words):
        simulate(program, H100)
