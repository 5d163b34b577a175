"""Plans as text of any width, and as one line."""

import io
from dataclasses import replace

import pytest

import sbp
from sbp.options import PipelineOptions
from sbp.passes.face import Plan
from sbp.passes.render.terminal import MAX_WIDTH, draw_rules, fit_lines, terminal_width
from sbp.passes.render.text import plan_text
from tests.golden import two_stages


@pytest.fixture(scope="module")
def pipeline() -> Plan:
    program = sbp.compile(
        two_stages.step,
        two_stages.step_placement,
        options=sbp.Options(pipeline=PipelineOptions(schedule="auto")),
    )
    plan = program.plan(*two_stages.step_args())
    assert plan.stages
    return plan


def words(text: str) -> set[str]:
    return {word.strip(",") for word in text.split()}


@pytest.mark.parametrize("width", [40, 57, 80, 100, 120, 140, 160])
def test_no_line_is_wider_than_the_terminal(plan: Plan, pipeline: Plan, width: int) -> None:
    noted = replace(plan, notes=("a note that is " + "longer " * 40,))
    for text in (plan_text(noted, width), plan_text(pipeline, width)):
        assert max(map(len, text.split("\n"))) <= width
        assert all(line == line.rstrip() for line in text.split("\n"))
    # Nothing is left out: a list says what the table says.
    for c in plan.collectives:
        assert words(c.reason) | words(c.source) <= words(plan_text(plan, width))


def test_the_table_stays_where_it_fits(plan: Plan) -> None:
    assert "before -> after" in plan_text(plan, MAX_WIDTH) and "before -> after" not in plan_text(plan, 80)
    assert plan_text(plan) == plan_text(plan, MAX_WIDTH) == str(plan)


def test_a_table_that_is_wider_than_any_terminal_is_a_list(plan: Plan) -> None:
    long = replace(plan.collectives[0], source="a_module_of_a_long_name_" * 5 + ".py:1")
    text = plan_text(replace(plan, collectives=(long,)))
    assert "before -> after" not in text and long.source in text


def test_no_terminal_has_no_width() -> None:
    assert terminal_width(io.StringIO()) is None
    closed = io.StringIO()
    closed.close()
    assert terminal_width(closed) is None
    assert fit_lines("x " * 200, None) == "x " * 200


def test_letters_for_lines() -> None:
    line = "\N{BOX DRAWINGS LIGHT HORIZONTAL}" * 3
    assert draw_rules(line, io.TextIOWrapper(io.BytesIO(), encoding="ascii")) == "---"
    assert (
        draw_rules(line, io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
        == draw_rules(line, io.StringIO())
        == line
    )


def test_repr_is_one_line(plan: Plan, pipeline: Plan) -> None:
    count = sum(c.count for c in plan.collectives)
    assert repr(plan).startswith(f"<Plan step on {plan.placement}: {count} collectives, ")
    assert repr(pipeline).startswith("<Plan step on cpu(stage=2 x data=2): 2 stages on 2 placements, ")
    cheapest = replace(plan, bound=plan.seconds, cheapest_seconds=None)
    for x, proof in ((cheapest, "proven optimal in serial time"), (pipeline, "proven optimal")):
        assert "\n" not in repr(x) and len(repr(x)) < 250 and f", {proof}" in repr(x)
        assert repr([x]) == f"[{x!r}]"


def test_repr_of_what_shows_itself_is_one_line() -> None:
    program = sbp.compile(lambda x: x * 2, sbp.placement("cpu", shape=(1,)))
    shown = repr(program.profile(1.0))
    assert shown.startswith("<Profile of <lambda> on cpu(x=1): measured ") and "\n" not in shown
