"""The measurements of a program beside its plan, with every way to show them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sbp.options import bytes_of
from sbp.passes.explain.measurement import MeasuredStep
from sbp.passes.face import Plan
from sbp.passes.pipeline.schedule_choice import ScheduleTask, found_schedule
from sbp.passes.render import files
from sbp.passes.render.measurement_text import (
    WIDTH,
    collective_rows,
    group_rows,
    measured_text,
    part_rows,
    ratio_text,
)
from sbp.passes.render.page import figures_table, heading, picture, short
from sbp.passes.render.stage_tables import NUMBERS, columns, place_heading
from sbp.passes.render.terminal import fit_lines, terminal_width
from sbp.passes.render.timeline import chrome_trace, timeline_svg
from sbp.passes.render.web_page import PageTable, profiled_page
from sbp.passes.schedule.actions import Kind, Schedule
from sbp.passes.schedule.spans import Timeline, largest_difference
from sbp.passes.schedule.times import Times
from sbp.text.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class ActionTime:
    """One kind of action of one stage; seconds of one micro-batch.

    Arguments:
      kind: "F", "B", "I" or "W"; "SF" and "SB" for its transfers.
      estimated_seconds: by the plan; None if the plan has no separate estimate.
      alone_seconds: measured with nothing else running; the median.
      together_seconds: measured while the other placements worked; None for transfers.
    """

    kind: Kind
    stage: int
    estimated_seconds: float | None
    alone_seconds: float
    together_seconds: float | None


@dataclass(frozen=True, repr=False)
class Profile:
    """The measurements of a program beside its plan; `print` shows them, `repr` is one line.

    Arguments:
      plan: of the program.
      step_seconds: a whole step as calls run it, the median.
      timeline: the loop over micro-batches as measured, every action waited for, each placement driven by a
        thread; None without micro-batches.
      simulated_timeline: the same, as the plan estimates it.
      replayed_timeline: the schedule, simulated with the measured times.
      live: per placement, the most micro-batches of its stages that were held at once.
      live_bytes: per placement, the most bytes that a device held for micro-batches.
      actions: the times of every kind of action and stage.
      times: the measured times, as a search for schedules takes them.
      driver_seconds: the driver's own time per action, without waiting.
      step: of a program of one placement, the breakdown into kernels, collectives and the rest.
      places: of a program with stages, the same for each placement; its kernels by lines.
      no_breakdown_reason: the reason if there is no breakdown.
      cores: of the processor that forced CPU devices share; None for other devices.
    """

    plan: Plan
    step_seconds: float
    timeline: Timeline | None = None
    simulated_timeline: Timeline | None = None
    replayed_timeline: Timeline | None = None
    live: tuple[int, ...] = ()
    live_bytes: tuple[int, ...] = ()
    actions: tuple[ActionTime, ...] = ()
    times: Times | None = None
    driver_seconds: float | None = None
    step: MeasuredStep | None = None
    places: tuple[MeasuredStep, ...] = ()
    no_breakdown_reason: str = ""
    cores: int | None = None
    task: ScheduleTask | None = field(default=None, repr=False, compare=False)

    def best(self, memory_limit: float | str | None = None) -> Schedule:
        """The fastest schedule found for the measured times, for `PipelineOptions(schedule=...)`.

        Arguments:
          memory_limit: per device, in bytes or as a text such as "80GB"; None for all memory of the device.

        Raises:
          ArgumentError: for a program without stages and micro-batches, or without a backward pass.
          MemoryLimitError: if nothing fits.
        """
        if self.task is None or self.times is None or not self.task.trains:
            raise files.problem(
                f"a profile of {self.plan.name!r}",
                "one of a training with stages and micro-batches",
                "a schedule orders the forwards and backwards of micro-batches",
                "sbp.microbatch(jax.value_and_grad(loss), 8, batch_args=1) and sbp.on(...)",
                "Profile.best",
            )
        limit_bytes = bytes_of(memory_limit, "Profile.best(memory_limit=...)")
        return found_schedule(self.task.search(limit_bytes, self.times))

    @property
    def step_breakdowns(self) -> tuple[MeasuredStep, ...]:
        """The breakdown, per placement; () if there is none."""
        return self.places if self.step is None else (self.step,)

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """All timelines, to be drawn one above the other."""
        found = (self.simulated_timeline, self.replayed_timeline, self.timeline)
        return tuple(t for t in found if t is not None)

    def figures(self) -> list[tuple[str, str]]:
        """The measured figures, each with its name."""
        out = [
            (
                "measured",
                f"{seconds_text(self.step_seconds)} per step; "
                f"estimated {seconds_text(self.plan.step_seconds)}",
            )
        ]
        divided = self.step_breakdowns
        if divided:
            devices = sum(step.devices for step in divided)
            also = f"with it on {seconds_text(divided[0].seconds)}, mean of {divided[0].devices} devices"
            each = " of each placement" if self.places else ""
            out.append(("divided", f"{divided[0].how}: a step {also}{each}"))
            if self.cores and devices > self.cores:
                share = f"{devices} devices share {self.cores} cores"
                out.append(("cores", f"{share}: what a device takes is also what it waits for one of them"))
        if self.no_breakdown_reason:
            out.append(("divided", f"not: {self.no_breakdown_reason}"))
        if (
            self.timeline is not None
            and self.simulated_timeline is not None
            and self.replayed_timeline is not None
        ):
            parts = (
                ("estimated", self.simulated_timeline),
                ("with measured times", self.replayed_timeline),
                ("measured", self.timeline),
            )
            out += [
                (
                    "loop",
                    "; ".join(
                        f"{name} {seconds_text(float(t.makespan))}, bubble {t.bubble_fraction:.1%}"
                        for name, t in parts
                    ),
                ),
                (
                    "apart",
                    "actions start and end within "
                    f"{largest_difference(self.timeline, self.replayed_timeline):.1%} of the loop of when "
                    "they are simulated with measured times",
                ),
                (
                    "held",
                    "; ".join(
                        f"{n} micro-batches, {bytes_text(b)} (placement {i})"
                        for i, (n, b) in enumerate(zip(self.live, self.live_bytes, strict=True))
                    ),
                ),
                ("driver", f"{1e6 * (self.driver_seconds or 0.0):.0f} us per action, not waiting"),
            ]
        return out

    def rows(self) -> list[tuple[str, ...]]:
        """The table of actions, with its headings."""
        out: list[tuple[str, ...]] = [("action", "stage", "estimated", "alone", "together", "ratio")]
        for a in self.actions:
            told = (
                "" if s is None else seconds_text(s)
                for s in (a.estimated_seconds, a.alone_seconds, a.together_seconds)
            )
            out.append((str(a.kind), str(a.stage), *told, ratio_text(a.alone_seconds, a.estimated_seconds)))
        return out

    def tables(self) -> list[PageTable]:
        """The tables of a page besides the plan's."""
        return [PageTable("Actions", self.rows(), NUMBERS)] if self.actions else []

    def __repr__(self) -> str:
        return f"<Profile of {self.plan.name} on {self.plan.placement}: measured {self.figures()[0][1]}>"

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """What `print` shows.

        Arguments:
          width: columns of a line; by default those of the terminal, or 80.
        """
        most = terminal_width() or WIDTH if width is None else width
        label = max(len(name) for name, _ in self.figures())
        lines = [
            f"{self.plan.name} on {self.plan.placement}",
            *(f"{name:<{label}}  {text}" for name, text in self.figures()),
        ]
        out = [
            fit_lines("\n".join(lines), most),
            *(["", *columns(self.rows())] if self.actions else []),
            *([measured_text(self.plan, self.step, most)] if self.step is not None else []),
        ]
        for i, step in enumerate(self.places):
            tables = measured_text(self.plan.stages[i], step, most, self.plan.step_seconds)
            out += ["", fit_lines(place_heading(self.plan, i), most), tables]
        return "\n".join(out)

    def _repr_html_(self) -> str:
        drawn = [picture(timeline_svg(self.timelines, self.plan.name))] if self.timelines else []
        table = [figures_table(self.rows(), NUMBERS)] if self.actions else []
        if self.step is not None:
            rows = [f(self.plan, self.step) for f in (part_rows, collective_rows, group_rows)]
            table += [figures_table(r, NUMBERS) for r in rows if len(r) > 1]
        return short([heading(self.plan.name, f"on {self.plan.placement}", self.figures()), *drawn, *table])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it; the suffix chooses the form: .html, or .svg or .trace.json of the timelines.

        Raises:
          ArgumentError: for another suffix; without micro-batches there are no timelines.
        """
        suffix = files.check_suffix(path, WRITERS if self.timelines else {".html": _page})
        files.write(path, WRITERS[suffix](self))


def _page(profile: Profile) -> str:
    return profiled_page(profile.plan, profile)


WRITERS: Mapping[str, Callable[[Profile], str]] = {
    ".html": _page,
    ".svg": lambda p: timeline_svg(p.timelines, f"{p.plan.name}: estimated and measured"),
    ".trace.json": lambda p: chrome_trace(p.timelines),
}
