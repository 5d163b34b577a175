"""The times of a step as JSON has them: spans of kernels, of collectives, and of one trip of each loop."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbp.passes.physical.evaluate import OVERLAPPING, Evaluator
from sbp.passes.physical.overlap import trip_spans
from sbp.passes.physical.program import Border, Box, Compute, Step


@dataclass(frozen=True)
class StepClock:
    """The times of the steps of a program.

    Arguments:
      rows: of steps that send, by id, their rows in the plan.
    """

    takes: Evaluator
    rows: Mapping[int, Sequence[int]]

    def step(self) -> dict[str, Any]:
        """The whole step: spans `[start, end, step]` of kernels, `[start, end, rows]` of collectives."""
        if self.takes.timeline is None:
            return self._one_by_one(self.takes.physical.steps)
        order, noted = self.takes.timeline
        steps = self.takes.physical.steps
        kernels, sent = list[list[Any]](), list[list[Any]]()
        for j, start, end, sends in noted.spans:
            node = order.nodes[j]
            if sends:
                members = [steps[i] for i in (node.makes or order.nodes[node.after[0]].reads)]
                sent.append([start, end, self._rows_of(members)])
            else:
                kernels.append([start, end, node.makes[0]])
        return {"kernels": kernels, "sent": sent}

    def trips(self, loop: Border) -> list[dict[str, Any]]:
        """One trip through each body of a loop or a branch; steps have the numbers of the body."""
        if self.takes.network.hardware.platform not in OVERLAPPING:
            found = [self._one_by_one(steps) for steps in loop.bodies]
        else:
            found = [self._trip(loop, k) for k in range(len(loop.bodies))]
        for k, trip in enumerate(found):
            course = self.takes.trip_course(loop, k)
            trip["held"] = [list(course.seconds), list(course.bytes)]
        return found

    def _trip(self, loop: Border, k: int) -> dict[str, Any]:
        number = {id(step): i for i, step in enumerate(loop.bodies[k])}
        kernels, sent = list[list[Any]](), list[list[Any]]()
        for span in trip_spans(loop, k, self.takes):
            ends = [span.start_seconds, span.end_seconds]
            if span.sends:
                sent.append([*ends, self._rows_of(span.steps)])
            else:
                kernels.append([*ends, number[id(span.steps[0])]])
        return {"kernels": kernels, "sent": sent}

    def _one_by_one(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Steps one after the other; each sends after it has computed."""
        kernels, sent, now = list[list[Any]](), list[list[Any]](), 0.0
        for i, step in enumerate(steps):
            for rows, seconds in self._parts(step):
                if seconds > 0:
                    (sent if rows else kernels).append([now, now + seconds, rows or i])
                    now += seconds
        return {"kernels": kernels, "sent": sent}

    def _parts(self, step: Step) -> Iterator[tuple[list[int], float]]:
        """The seconds of a step, and of what it sends, with its rows."""
        rows, whole = self._rows_of([step]), self.takes.together_seconds(step)
        if isinstance(step, Compute) and rows:
            communication = [seconds for _, seconds in self.takes.communication_times(step)]
            yield [], max(0.0, whole - sum(communication))
            yield from (([row], seconds) for row, seconds in zip(rows, communication, strict=False))
        else:
            yield rows if isinstance(step, Box) else [], whole

    def _rows_of(self, steps: Iterable[Step]) -> list[int]:
        return sorted({row for step in steps for row in self.rows.get(id(step), ())})
