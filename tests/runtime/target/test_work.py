"""Bytes and arithmetic of kernels: what of operands and results is really used."""

import pytest

from sbp.runtime.hlo.parser import parse
from sbp.runtime.target.matmuls import MatrixProduct
from sbp.runtime.target.work import Work, work_of

BIG, ROW = 1024 * 256 * 4, 256 * 4
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def work(line: str, params: list[str], fused: list[str] | None = None) -> Work:
    """The work of `line` on parameters of these shapes; `fused` is what it calls."""
    entry = [f"  %p{i} = {shape} parameter({i})" for i, shape in enumerate(params)]
    inner = [f"  %q{i} = {shape} parameter({i})" for i, shape in enumerate(params)]
    called = "\n".join(
        [
            "%fused () -> f32[] {",
            *inner,
            *(f"  {x}" for x in fused or ["ROOT %z = f32[] add(%q0, %q0)"]),
            "}\n",
        ]
    )
    text = "\n".join(
        [
            "HloModule m, is_scheduled=true",
            ADD,
            called,
            "ENTRY %e () -> f32[] {",
            *entry,
            f"  ROOT %r = {line}",
            "}\n",
        ]
    )
    module = parse(text)
    computation = module.computations["e"]
    return work_of(module, computation, computation.instructions["r"])


def fusion(result: str, params: list[str], *fused: str, operands: str = "") -> Work:
    given = operands or ", ".join(f"%p{i}" for i in range(len(params)))
    return work(f"{result} fusion({given}), kind=kLoop, calls=%fused", params, list(fused))


def test_an_addition_reads_two_and_writes_one() -> None:
    big = "f32[1024,256]"
    assert work(f"{big} add(%p0, %p1)", [big, big]) == Work(3 * BIG, 1024 * 256)
    assert fusion(big, [big, big], f"ROOT %z = {big} add(%q0, %q1)") == Work(3 * BIG, 1024 * 256)


def test_one_operand_given_twice_is_read_once() -> None:
    big = "f32[1024,256]"
    found = fusion(big, [big, big], f"ROOT %z = {big} add(%q0, %q1)", operands="%p0, %p0")
    assert found.bytes == 2 * BIG


@pytest.mark.parametrize(
    "opcode", ["parameter(0)", "bitcast(%p0)", "get-tuple-element(%p0), index=0", "tuple(%p0)", "constant(1)"]
)
def test_what_is_free(opcode: str) -> None:
    assert work(f"f32[1024,256] {opcode}", ["f32[1024,256]"]) == Work()


def test_of_what_is_sliced_only_the_part_is_read() -> None:
    found = fusion(
        "f32[1,256]",
        ["f32[1024,256]", "s32[]"],
        "%d = f32[1,256] dynamic-slice(%q0, %q1, %q1), dynamic_slice_sizes={1,256}",
        "ROOT %z = f32[1,256] negate(%d)",
    )
    assert found.bytes == 2 * ROW + 4


def test_two_slices_read_two_parts() -> None:
    found = fusion(
        "f32[1,256]",
        ["f32[1024,256]"],
        "%a = f32[1,256] slice(%q0), slice={[0:1], [0:256]}",
        "%b = f32[1,256] slice(%q0), slice={[1:2], [0:256]}",
        "ROOT %z = f32[1,256] add(%a, %b)",
    )
    assert found == Work(3 * ROW, 256)


def test_arithmetic_before_a_slice_is_only_that_of_the_part() -> None:
    found = fusion(
        "f32[1,256]",
        ["f32[1024,256]"],
        "%a = f32[1024,256] negate(%q0)",
        "ROOT %z = f32[1,256] slice(%a), slice={[0:1], [0:256]}",
    )
    assert found == Work(2 * ROW, 256)


def test_a_gather_reads_its_rows() -> None:
    found = fusion(
        "f32[16,256]",
        ["f32[1024,256]", "s32[16]"],
        "ROOT %z = f32[16,256] gather(%q0, %q1), offset_dims={1}, collapsed_slice_dims={0}, "
        "start_index_map={0}, index_vector_dim=1, slice_sizes={1,256}",
    )
    assert found.bytes == 2 * 16 * ROW + 16 * 4


def test_an_update_in_place_writes_the_update() -> None:
    found = fusion(
        "f32[1024,256]",
        ["f32[1024,256]", "f32[1,256]", "s32[]"],
        "%n = f32[1,256] negate(%q1)",
        "ROOT %z = f32[1024,256] dynamic-update-slice(%q0, %n, %q2, %q2)",
    )
    assert found.bytes == 2 * ROW + 4
    alone = work(
        "f32[1024,256] dynamic-update-slice(%p0, %p1, %p2, %p2)", ["f32[1024,256]", "f32[1,256]", "s32[]"]
    )
    assert alone.bytes == 2 * ROW + 4


def test_an_update_of_what_is_computed_writes_all_of_it() -> None:
    found = fusion(
        "f32[1024,256]",
        ["f32[1024,256]", "f32[1,256]", "s32[]"],
        "%n = f32[1024,256] negate(%q0)",
        "ROOT %z = f32[1024,256] dynamic-update-slice(%n, %q1, %q2, %q2)",
    )
    assert found.bytes == BIG + (BIG - ROW) + ROW + 4


def test_a_scatter_reads_and_writes_the_rows_that_it_meets() -> None:
    found = fusion(
        "f32[1024,256]",
        ["f32[1024,256]", "s32[16,1]", "f32[16,256]"],
        "ROOT %z = f32[1024,256] scatter(%q0, %q1, %q2), update_window_dims={1}, to_apply=%add",
    )
    assert found == Work(3 * 16 * ROW + 16 * 4, 16 * 256)


def test_a_broadcast_reads_what_it_spreads() -> None:
    found = fusion("f32[1024,256]", ["f32[256]"], "ROOT %z = f32[1024,256] broadcast(%q0), dimensions={1}")
    assert found == Work(BIG + ROW, 0)


def test_a_reduction_reads_all_and_adds_all() -> None:
    found = fusion(
        "f32[256]",
        ["f32[1024,256]"],
        "%c = f32[] constant(0)",
        "ROOT %z = f32[256] reduce(%q0, %c), dimensions={0}, to_apply=%add",
    )
    assert found == Work(BIG + ROW, 1024 * 256)


def test_transcendental_functions_are_dearer() -> None:
    tanh, negate = (
        fusion("f32[1024,256]", ["f32[1024,256]"], f"ROOT %z = f32[1024,256] {op}(%q0)")
        for op in ("tanh", "negate")
    )
    assert tanh.operations > 10 * negate.operations
    assert tanh.bytes == negate.bytes == 2 * BIG


def test_a_product_with_what_is_fused_into_it() -> None:
    found = fusion(
        "f32[1024,64]",
        ["f32[1024,256]", "f32[256,64]"],
        "%n = f32[1024,256] negate(%q0)",
        "ROOT %z = f32[1024,64] dot(%n, %q1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    assert found == Work(
        BIG + 256 * 64 * 4 + 1024 * 64 * 4, 1024 * 256, (MatrixProduct(1, 1024, 64, 256, "f32"),)
    )
    assert found.flops == 2 * 1024 * 64 * 256


def test_several_results_are_all_written() -> None:
    found = fusion(
        "(f32[1024,256], f32[1024,256], f32[1024,256])",
        ["f32[1024,256]"],
        "%a = f32[1024,256] negate(%q0)",
        "%b = f32[1024,256] abs(%q0)",
        "ROOT %z = (f32[1024,256], f32[1024,256], f32[1024,256]) tuple(%a, %b, %q0)",
    )
    assert found == Work(3 * BIG, 2 * 1024 * 256)


def test_async_fusions_are_fusions() -> None:
    line = "((f32[1024,256]), f32[1024,256], u32[]) fusion-start(%p0), kind=kLoop, calls=%fused"
    assert work(line, ["f32[1024,256]"], ["ROOT %z = f32[1024,256] negate(%q0)"]) == Work(2 * BIG, 1024 * 256)


def test_of_an_unknown_library_call_the_bytes_are_known() -> None:
    found = work('f32[1024,256] custom-call(%p0), custom_call_target="mine"', ["f32[1024,256]"])
    assert found == Work(2 * BIG, known=False)


def test_a_sort_goes_over_its_keys_several_times() -> None:
    found = work("f32[1024,256] sort(%p0), dimensions={1}, to_apply=%add", ["f32[1024,256]"])
    assert found.bytes == (1 + 2 * 4) * BIG
