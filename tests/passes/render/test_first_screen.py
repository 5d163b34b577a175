"""The first screen: the same collectives first in text, page and SVG, and what has ended a search."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import sbp
from sbp import B, S
from sbp.passes.explain.notes import cut_note
from sbp.passes.explain.plan import Collective
from sbp.passes.explain.words import as_one, messages, rows, share_text
from sbp.passes.face import Plan
from sbp.passes.render.page_data import page_data
from sbp.passes.render.svg import claim_svg
from sbp.passes.render.svg_claim import COSTLIEST
from sbp.passes.render.svg_parts import WARN


def waiting(c: Collective, k: int, seconds: float, exposed: float) -> Collective:
    """A collective of its own row."""
    return replace(
        c, tensor=f"t{k}", shape=(k + 1,), seconds=seconds, exposed_seconds=exposed, count=1, name=""
    )


def test_what_kernels_wait_for_comes_first_everywhere(plan: Plan) -> None:
    """Not what takes long and is hidden; that is ranked behind it, by its time."""
    (first, *_) = plan.collectives
    figures = [(9e-5, 0.0), (1e-6, 1e-6), (8e-5, 0.0), (3e-6, 2e-6), (7e-5, 0.0), (5e-5, 5e-5), (6e-5, 0.0)]
    found = replace(plan, collectives=tuple(waiting(first, k, *f) for k, f in enumerate(figures)))
    wanted = ["t5", "t3", "t1", "t0", "t2"]
    assert [r.collective.tensor for r in rows(found, COSTLIEST)[0]] == wanted
    text, svg, data = str(found), claim_svg(found), page_data(found)["rows"]
    for shown in (text, svg):
        places = [shown.index(f"{t} " if shown is text else f">{t}<") for t in wanted]
        assert places == sorted(places)
    order = sorted(range(len(figures)), key=lambda k: (data["exposed"][k], data["seconds"][k]), reverse=True)
    assert [data["tensor"][k] for k in order[:COSTLIEST]] == wanted
    assert "exposed" in text and f"{5e-5 / found.step_seconds:.1%}" in text and "0.0%" in text


def test_what_xla_sends_as_one_is_one_row(plan: Plan) -> None:
    """Its time counts together; the costliest leads. The same in text and SVG; a page has every row."""
    (first, *_) = plan.collectives
    figures = [(9e-5, 2e-6), (1e-6, 1e-6), (8e-5, 3e-6), (3e-6, 2e-6), (1e-6, 0.0)]
    sent = tuple(waiting(first, k, *f) for k, f in enumerate(figures))
    sent = tuple(replace(c, message="" if k in (2, 4) else "row0") for k, c in enumerate(sent))
    found = replace(plan, collectives=sent)
    one, other, _ = messages(found)
    assert (as_one(one).collective.exposed_seconds, as_one(one).times) == (pytest.approx(5e-6), 3)
    assert [r.collective.tensor for r in one + other] == ["t0", "t3", "t1", "t2"]
    assert [share_text(found, r) for r in one][1:] == ["with above"] * 2
    text, svg, data = str(found), claim_svg(found), page_data(found)["rows"]
    assert text.count("with above") == 2 and text.index("t1 ") < text.index("t2 ")
    assert svg.index("t0, in a message with 2 more") < svg.index(">t2<") and "t1" not in svg
    assert data["message"] == ["row0", "row0", "", "row0", ""]
    apart = replace(found, collectives=tuple(replace(c, message="") for c in sent))
    assert [r.collective.tensor for r in rows(apart)[0]] == ["t2", "t0", "t3", "t1", "t4"]
    assert "with above" not in str(apart)


def test_messages_are_those_of_the_schedule() -> None:
    """Gradients of two weights that are ready together leave as one; of a CPU nothing does."""

    def step(w: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[jax.Array, ...]:
        a, b = jax.grad(lambda w: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]).sum())(w)
        return w[0] - a, w[1] - b

    w, x = (jnp.ones((64, 64)), jnp.ones((64, 32))), jnp.ones((1 << 16, 64))
    for hardware, sent in (("h100", ["row0"]), ("cpu", [""])):
        place = sbp.placement(hardware, shape=(8,))
        plan = sbp.compile(step, place, in_sbp=(B, S(0)), options=sbp.Options(cache=False)).plan(w, x)
        assert [c.kind for c in plan.collectives] == ["all_reduce"] * 2
        assert [c.message for c in plan.collectives] == sent * 2
        assert len(messages(plan)) == (1 if hardware == "h100" else 2)


def test_a_search_that_was_cut_short_says_so_first(plan: Plan) -> None:
    """In amber where there are colours, with what would help among the notes."""
    cut = replace(plan, notes=(cut_note(5.0),))
    assert cut.cut_short and not plan.cut_short
    assert "CUT SHORT by its limit on time; " in str(cut) and "Options(time_limit=20)" in str(cut)
    assert "CUT SHORT" not in str(plan)
    amber = f'fill="{WARN}">CUT SHORT'
    assert amber in claim_svg(cut) and amber not in claim_svg(plan)
    figures = page_data(cut)["figures"]
    assert (figures["cut_short"], figures["gap"]) == (True, "cut short")
    assert not page_data(plan)["figures"]["cut_short"]
