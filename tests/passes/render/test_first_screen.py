"""The first screen: the same collectives first in text, page and SVG, and what has ended a search."""

from dataclasses import replace

from sbp.passes.explain.notes import cut_note
from sbp.passes.explain.plan import Collective
from sbp.passes.explain.words import rows
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
