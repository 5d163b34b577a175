"""`ProgramReport` and `PipelineReport`: plan against compiled programs, with every way to show them.

The simulated step of a program compiled for GPUs, laid over its plan as a measured one is.
"""

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sbp.passes.explain.measurement import MeasuredSpan, MeasuredStep
from sbp.passes.face import Plan
from sbp.passes.render import files
from sbp.passes.render.timeline import chrome_trace
from sbp.passes.schedule.spans import Timeline
from sbp.rates.chips import Chip
from sbp.runtime.profile.trace_alignment import collective_times
from sbp.runtime.profile.trace_attribution import SENDING, StepAttribution
from sbp.runtime.report import pipeline_contents, program_contents
from sbp.runtime.report.contents import Contents, contents_html, contents_page, contents_text
from sbp.runtime.report.pipeline_comparison import ComparedPipeline
from sbp.runtime.target.comparison import ComparedProgram, HasMemory, compare
from sbp.runtime.target.events import KERNELS, LOOPS, Simulation


def simulated_step(report: ComparedProgram) -> MeasuredStep | None:
    """The simulated step; None where nothing was simulated.

    Its kernels are not told apart by steps of the program: their names in the compiled program are those of
    the user's scopes. What waits for copies to and from the host is nobody's.
    """
    simulation = report.simulation
    if simulation is None:
        return None
    found = StepAttribution(simulation.seconds, 1)
    found.collectives = defaultdict(float, {c.instruction: c.seconds or 0.0 for c in report.collectives})
    exposed = {c.instruction: c.exposed_seconds or 0.0 for c in report.collectives}
    found.by_cause[SENDING].update(exposed)
    found.times = Counter({c.instruction: c.count for c in report.collectives if not c.conditional})
    rest = simulation.seconds - simulation.kernel_seconds - math.fsum(exposed.values())
    return MeasuredStep(
        "simulated",
        f"for {report.target}",
        simulation.seconds,
        1,
        (),
        simulation.kernel_seconds,
        tuple(collective_times(report, found)),
        0.0,
        max(0.0, rest),
        0.0,
        tuple(_spans(report, simulation)),
    )


def _spans(report: ComparedProgram, simulation: Simulation) -> Iterator[MeasuredSpan]:
    """What runs when, the first trip of a loop."""
    rows = {c.instruction: c.rows for c in report.collectives}
    for e in simulation.events:
        if e.resource == LOOPS:
            continue
        origin = report.origins.get(e.instruction)
        label = origin.source if origin is not None and origin.source else e.instruction
        sends = e.resource != KERNELS
        own = rows.get(e.instruction, ())
        yield MeasuredSpan(e.start_seconds, e.end_seconds, -1, own, sends, label=label)


SUFFIXES = (".json", ".html", ".txt", files.TRACE)
"""Of the files that a report can be saved to; a trace only if something was simulated."""


@dataclass(frozen=True, repr=False)
class ProgramReport(ComparedProgram):
    """Plan against compiled program; `print` shows it, `save` writes it. Made by `Program.report`."""

    def __str__(self) -> str:
        return contents_text(self.contents)

    def __repr__(self) -> str:
        return self.contents.summary

    def _repr_html_(self) -> str:
        return contents_html(self.contents)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report; the suffix chooses the form: .json, .html, .txt, or .trace.json for Perfetto.

        Raises:
          ArgumentError: for another suffix, or for a trace where nothing could be simulated.
        """
        forms: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.data, indent=1) + "\n",
            ".html": lambda: contents_page(self.contents, self.timelines, self.simulated_steps),
            ".txt": self.__str__,
        }
        if self.trace is not None:
            forms[files.TRACE] = self.trace
        files.write(path, forms[files.check_suffix(path, forms)]())

    @property
    def contents(self) -> Contents:
        """What it shows."""
        return program_contents.contents(self)

    @property
    def data(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return program_contents.data(self)

    @property
    def simulated_steps(self) -> Sequence[MeasuredStep]:
        """The simulated step, as the page shows it beside the plan."""
        step = simulated_step(self)
        return () if step is None else (step,)

    @property
    def timelines(self) -> Sequence[Timeline]:
        """The schedules that the page draws; () for the plan's own."""
        return ()

    @property
    def trace(self) -> Callable[[], str] | None:
        """Writes the simulated step for Perfetto; None if nothing was simulated."""
        return None if self.simulation is None else lambda: program_contents.trace(self)


@dataclass(frozen=True, repr=False)
class PipelineReport(ComparedPipeline, ProgramReport):
    """Plan against compiled pieces; shown as a `ProgramReport` is."""

    @property
    def contents(self) -> Contents:
        """What it shows."""
        return pipeline_contents.contents(self)

    @property
    def data(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return pipeline_contents.data(self)

    @property
    def simulated_steps(self) -> Sequence[MeasuredStep]:
        """Nothing: schedules are drawn instead."""
        return ()

    @property
    def timelines(self) -> Sequence[Timeline]:
        """The planned and the simulated schedule; () if it was not simulated."""
        planned = self.plan.timeline
        return () if self.timeline is None or planned is None else (planned, self.timeline)

    @property
    def trace(self) -> Callable[[], str] | None:
        """Writes the simulated schedule for Perfetto; None if it was not simulated."""
        timeline = self.timeline
        return None if timeline is None else lambda: chrome_trace([timeline])


def report_of(
    plan: Plan,
    compiled: HasMemory,
    chip: Chip | None,
    lowered_text: Callable[[], str],
    domain_devices: int | None = None,
) -> ProgramReport:
    """The report of a compiled program; arguments as of `compare`.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.
    """
    found = compare(plan, compiled, chip, lowered_text, domain_devices)
    return ProgramReport(**{f.name: getattr(found, f.name) for f in fields(found)})
