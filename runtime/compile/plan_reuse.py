"""Takes the plan of an earlier compilation instead of a search: `Options(plan=...)`."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from sbp.errors import Problem
from sbp.layout import at_rest
from sbp.notation.resolve import check_fit
from sbp.passes.face import Plan, load_plan
from sbp.passes.plan.record import ChoiceRecord
from sbp.passes.program.graph import Const, Value
from sbp.passes.program.trace import TracedProgram
from sbp.placement import Placement
from sbp.signature import NdSbp, format_sbp

Leaves: TypeAlias = Sequence[NdSbp | None]

AGAIN = "make the plan again with Program.plan(...), or leave the option out"


@dataclass(frozen=True)
class ReusedPlan:
    """The signatures that a plan gives to arguments and results which have none.

    Arguments:
      ins, outs: signatures of all leaves.
      record: the plan's signatures of the ops; None if the user asks for other signatures than it has.
      problems: why the plan cannot be taken.
    """

    ins: tuple[NdSbp | None, ...]
    outs: tuple[NdSbp | None, ...]
    record: ChoiceRecord | None = None
    problems: tuple[Problem, ...] = ()


def given_plan(plan: object) -> object:
    """The plan in `Options(plan=...)`, loaded if it is the name of a file.

    Raises:
      ArgumentError: for a file that holds no plan.
    """
    return load_plan(plan) if isinstance(plan, str | os.PathLike) else plan


def adopt(plan: object, traced: TracedProgram, ins: Leaves, outs: Leaves, placement: Placement) -> ReusedPlan:
    """The signatures of a plan for every argument and result without one, and why they do not fit.

    Arguments:
      plan: a loaded plan.
      ins, outs: the signatures that the user asks for.
    """
    asked = ReusedPlan(tuple(ins), tuple(outs))
    problems = tuple(_unfit(plan, traced, asked, placement))
    if problems or not isinstance(plan, Plan):
        return replace(asked, problems=problems)
    record = plan.choice
    if record is not None:
        same = (
            _agrees(ins, record.asked_inputs, plan.in_sbp),
            _agrees(outs, record.asked_outputs, plan.out_sbp),
        )
        if all(same):
            # What was asked then, and not what was chosen: the program is the same only so.
            return ReusedPlan(_filled(ins, record.asked_inputs), _filled(outs, record.asked_outputs), record)
    return ReusedPlan(_filled(ins, plan.in_sbp), _filled(outs, plan.out_sbp))


def _agrees(asked: Leaves, then: Leaves, chosen: Leaves) -> bool:
    """Whether the plan has what the user asks for now."""
    return len(asked) == len(then) and all(
        now is None or now == (there if before is None else before)
        for now, before, there in zip(asked, then, chosen, strict=True)
    )


def _filled(asked: Leaves, other: Leaves) -> tuple[NdSbp | None, ...]:
    return tuple(there if own is None else own for own, there in zip(asked, other, strict=True))


def _unfit(plan: object, traced: TracedProgram, asked: ReusedPlan, placement: Placement) -> Iterator[Problem]:
    """Why a plan cannot be the plan of a call."""
    if not isinstance(plan, Plan):
        legal, why = "a Plan, or the .json file that one was saved to", f"a {type(plan).__name__} is none"
        yield _problem(f"{plan!r:.60}", legal, why, "sbp.load_plan('plan.json')")
        return
    if plan.placement.shape != placement.shape:
        why = "a signature has one entry per axis, and its splits fit the axis sizes"
        yield _problem(f"a plan for {plan.placement}", f"a plan for {placement}", why)
        return
    graph = traced.graph
    for what, paths, theirs, given, planned, ends in (
        ("arguments", traced.in_paths, plan.in_paths, asked.ins, plan.in_sbp, graph.inputs),
        ("results", traced.out_paths, plan.out_paths, asked.outs, plan.out_sbp, graph.outputs),
    ):
        if tuple(paths) != tuple(theirs):
            missing = [p for p in paths if p not in theirs]
            unknown = [p for p in theirs if p not in paths]
            odd = [f"no entry for {p}" for p in missing[:3]] + [f"an entry for {p}" for p in unknown[:3]]
            yield _problem(
                f"a plan of {plan.name!r} with {', '.join(odd) or 'another order'}",
                f"a plan with the same {len(paths)} {what}",
                "a plan is for one function and one tree of arguments",
            )
            continue
        for path, own, nd, x in zip(paths, given, planned, ends, strict=False):
            if own is None:
                yield from _misfit(nd, graph.operand(x), path, placement)


def _misfit(nd: NdSbp, value: Value | Const, path: str, placement: Placement) -> Iterator[Problem]:
    """Why a planned signature does not fit a tensor: another rank, or a size that does not divide."""
    where = f"{path}: {value.dtype}{list(value.shape)}, Options(plan=...)"
    found = list(check_fit(nd, value.shape, value.dtype, where, placement))
    yield from found
    if not found and at_rest(value.shape, nd, placement.shape) != nd:
        legal = format_sbp(at_rest(value.shape, nd, placement.shape))
        why = "the plan was made for other sizes: this one does not divide by the axis"
        yield Problem("argument", where, format_sbp(nd), legal, why, AGAIN)


def _problem(got: str, legal: str, why: str, fix: str = AGAIN) -> Problem:
    return Problem("argument", "Options(plan=...)", got, legal, why, fix)
