"""`Plan`: what the compiler has found out, with every way to show it; `load_plan` reads it again.

Plans are data (`explain/plan.py`, `pipeline/plan.py`); `look/` makes texts, pages, pictures and files of
them. Here both are put together, so that neither needs the other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from sbp.passes.explain.plan import PlanData
from sbp.passes.look import files, page, pipeline_files, pipeline_page, pipeline_text, text
from sbp.passes.pipeline.plan import PipelineData


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """What a program will do, and why; `print` shows it, `repr` is one line."""

    def __str__(self) -> str:
        return text.plan_text(self)

    def __repr__(self) -> str:
        return text.plan_line(self)

    def _repr_html_(self) -> str:
        return page.plan_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan; the suffix chooses the form: .json, .html, .dot or .svg, with stages .trace.json.

        Raises:
          ValueError: for another suffix.
        """
        files.save_plan(self, path)


@dataclass(frozen=True, repr=False)
class PipelinePlan(PipelineData, Plan):
    """What a program with stages will do, and why; shown as any plan is."""

    def __str__(self) -> str:
        return pipeline_text.plan_text(self)

    def __repr__(self) -> str:
        return pipeline_text.plan_line(self)

    def _repr_html_(self) -> str:
        return pipeline_page.plan_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan, as `Plan.save` does."""
        pipeline_files.save_plan(self, path)


def faced(plan: PlanData) -> Plan:
    """The plan with its ways to be shown, those of its stages too."""
    if isinstance(plan, Plan):
        return plan
    # Field by field, without a copy: the program inside may be large.
    given: dict[str, Any] = {f.name: getattr(plan, f.name) for f in fields(plan)}
    if isinstance(plan, PipelineData):
        return PipelinePlan(**given | {"stages": tuple(map(faced, plan.stages))})
    return Plan(**given)


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Reads a plan that was saved as .json; its `physical` is None.

    Raises:
      ArgumentError: if the file holds no plan, or one of a version that is not known.
    """
    return faced(files.load_plan(path, {"stages": pipeline_files.read_plan}))
