"""A program as JSON: what every device executes, so that others can add up what a plan says of it.

Values are numbered; a *version* is `[value, signature]`. A step is one of

- `{"op", "at", "phase", "scope", "reads", "writes", "seconds", "work", "sends"}`: an op under its signature,
  where it stands in the user's program and in which pass over it. `work` is its
  arithmetic (products `[batch, m, n, k, bytes of an element]`, or `flops`), its `traffic_bytes`, and whether
  it `launches` a kernel; `seconds` has all of that and what it sends.
- `{"move", "value", "axes", "before", "after", "seconds", "row"}`: a collective (with its row in the plan's
  `collectives`) or a local step. `sent_as` is the narrower dtype in which it goes, with its bytes.
- `{"loop", "trips", "assumed_trips", "timelines", "reads", "writes", "enters", "leaves", "wires", "bodies"}`:
  a loop or a branch, with the timeline of one trip through each body. A wire is what goes through its border:
  from outside, to inside, back from inside, to outside.

`peak` lists what is alive when most is, with the bytes of each; `between_bytes` is what lies unused between.
`course` is what is held over the step (bytes, and when), and `timeline` when what runs, as XLA's scheduler
orders it, or one after the other where nothing runs beside anything (clock.py); that of a trip has what it
holds besides (`held`: when, and bytes). `names` are what values
are called, and `lines` the user's text around every line that is spoken of, with the function around it.

The times of a step as JSON has them: spans of kernels, of collectives, and of one trip of each loop.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sbp.compat import core
from sbp.passes.boxing.links import Network
from sbp.passes.explain.collectives import rows_of
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Border, Box, Compute, Physical, Step, Version, reads, writes
from sbp.passes.physical.step_schedule import Trip, trips_of
from sbp.passes.plan.cost import communication_seconds, node_work
from sbp.passes.program.control import assumed_trips, ports, trips
from sbp.passes.program.graph import Const, Node, Source
from sbp.passes.program.names import Names, loop_name
from sbp.passes.render.user_lines import clean_scope, excerpt, function_at
from sbp.signature import format_sbp

MOST_POINTS = 600
"""Of a curve."""
SAME_BYTES = 1e-9
"""Relative: a peak that differs by more is not the program's own, as of a placement with a schedule."""


def program_data(plan: PlanData) -> Mapping[str, Any] | None:
    """The program of a plan, as JSON has it; None for one that has none."""
    if plan.physical is None:
        return plan.program
    if "program" not in plan.form_cache:
        plan.form_cache["program"] = _Writer(plan, plan.physical).data()
    found: Mapping[str, Any] = plan.form_cache["program"]
    return found


@dataclass(frozen=True)
class _Writer:
    plan: PlanData
    physical: Physical

    @cached_property
    def takes(self) -> Evaluator:
        return Evaluator(self.physical, Network(self.plan.placement, self.plan.hardware), self.plan.donated)

    @cached_property
    def rows(self) -> dict[tuple[int, int], int]:
        """The row of each collective, by the id of its step and its number in an op (-1: a move).

        By identity, since equal steps are collectives of their own.
        """
        return {
            (id(what), -1) if isinstance(what, Box) else (id(what.step), what.position): row
            for row, what, _ in rows_of(self.physical)
        }

    def data(self) -> dict[str, Any]:
        p = self.physical
        steps = [self.step(s) for s in p.steps]
        outputs = [None if isinstance(x, Const) else x for x in p.graph.outputs]
        used = sorted(self.used_values(steps, outputs))
        found: dict[str, Any] = {
            "inputs": [_version(v) for v in zip(p.graph.inputs, p.inputs, strict=True)],
            "outputs": [[x, format_sbp(nd)] for x, nd in zip(outputs, p.outputs, strict=True)],
            "values": {str(v): self.value(v) for v in used},
            "names": {str(v): self.names.of(v) for v in used},
            "lines": {str(s): line_data(s) for s in self.sources()},
            "steps": steps,
        }
        live = self.takes.at_peak
        total, peak = sum(x.bytes for x in live), self.takes.peak_bytes()
        if abs(peak - self.plan.memory_bytes) <= SAME_BYTES * peak:
            found["peak"] = [[*_version(x.version), x.bytes] for x in live]
            found["between_bytes"] = peak - total
            found |= self.course()
        found["timeline"] = self.clock.step()
        return found

    def course(self) -> dict[str, Any]:
        """What a device holds over a step."""
        course = self.takes.course
        times = _thinned(self.takes.course_seconds, course)
        return {"course": {"bytes": _thinned(list(course), course), "seconds": times}}

    @cached_property
    def clock(self) -> StepClock:
        rows: dict[int, list[int]] = {}
        for (who, _), row in self.rows.items():
            rows.setdefault(who, []).append(row)
        return StepClock(self.takes, rows)

    @cached_property
    def names(self) -> Names:
        return Names(self.physical.graph, self.plan.in_paths, self.plan.out_paths)

    def sources(self) -> Iterator[Source]:
        """The user's lines, each once."""
        found = (s.source if isinstance(s, Box) else s.node.source for s, _ in self.physical.walk())
        return iter({str(s): s for s in found if s.file}.values())

    def used_values(self, steps: Iterable[dict[str, Any]], outputs: Iterable[int | None]) -> set[int]:
        """The values that are spoken of."""
        found = {x for x in (*self.physical.graph.inputs, *outputs) if x is not None}
        for s in steps:
            found.update(v for v, _ in (*s.get("reads", ()), *s.get("writes", ())))
            found.update(v for k in ("enters", "leaves") for body in s.get(k, ()) for v, _ in body)
            found.update([s["value"]] if "value" in s else ())
            found |= self.used_values(itertools.chain.from_iterable(s.get("bodies", ())), ())
        return found

    def value(self, v: int) -> list[Any]:
        """Shape, dtype, and the bytes of an element."""
        value = self.physical.graph.values[v]
        return [list(value.shape), str(value.dtype), core.itemsize(value.dtype)]

    def step(self, step: Step) -> dict[str, Any]:
        if isinstance(step, Box):
            return self.move(step)
        lying = {"reads": list(map(_version, reads(step))), "writes": list(map(_version, writes(step)))}
        return self.op(step, lying) if isinstance(step, Compute) else self.loop(step, lying)

    def move(self, box: Box) -> dict[str, Any]:
        m = box.move
        found = {
            "move": m.kind,
            "value": box.value,
            "axes": list(m.axes),
            "before": format_sbp(m.before),
            "after": format_sbp(m.after),
            "seconds": self.takes.box_seconds(box),
        }
        if box.sent_as is not None:
            found["sent_as"] = [str(box.sent_as), core.itemsize(box.sent_as)]
        row = self.rows.get((id(box), -1))
        return found if row is None else found | {"row": row}

    def op(self, step: Compute, lying: dict[str, Any]) -> dict[str, Any]:
        p, network = self.physical, self.takes.network
        work = node_work(p.graph, step.node, step.strategy, p.placement.shape, p.traffic.get(step.node.id))
        said: dict[str, Any] = {"traffic_bytes": work.traffic_bytes, "launches": work.launches}
        if (x := work.product) is None:
            said["flops"] = work.flops
        else:
            said["product"] = [x.batch, x.m, x.n, x.k, max(map(core.itemsize, x.dtypes))]
        sends = [
            {
                "kind": t.kind,
                "axes": list(t.axes),
                "wire_bytes": t.wire_bytes,
                "seconds": communication_seconds(t, network),
                "row": self.rows[id(step), k],
            }
            for k, t in enumerate(work.communication)
        ]
        head = {"op": step.node.op} | self.place(step.node)
        return head | lying | {"seconds": self.takes.seconds_of(step), "work": said, "sends": sends}

    def loop(self, step: Border, lying: dict[str, Any]) -> dict[str, Any]:
        enters: list[list[Any]] = [[] for _ in step.bodies]
        leaves: list[list[Any]] = [[] for _ in step.bodies]
        for port, nd in zip(ports(step.node), step.inner_signatures, strict=True):
            for k, body in enumerate(step.node.bodies):
                enters[k] += [_version((v, nd)) for v in port.enters if v in body.inputs]
                leaves[k] += [_version((x, nd)) for x in port.left_by(k) if isinstance(x, int)]
        wires = []
        for port, nd in zip(ports(step.node), step.inner_signatures, strict=True):
            x = None if port.operand is None else step.node.inputs[port.operand]
            wires.append(
                [
                    _version((x, port.outer(nd))) if isinstance(x, int) else None,
                    [_version((v, nd)) for v in port.enters],
                    [_version((v, nd)) for v in port.leaves if isinstance(v, int)],
                    None
                    if port.result is None
                    else _version((step.node.outputs[port.result], port.outer(nd))),
                ]
            )
        counted: dict[str, Any] = {"trips": trips(step.node), "assumed_trips": assumed_trips(step.node)}
        counted |= {"timelines": self.clock.trips(step)}
        bodies = [list(map(self.step, body)) for body in step.bodies]
        head = {"loop": step.node.op, "name": loop_name(step.node)} | self.place(step.node)
        inside = {"enters": enters, "leaves": leaves, "wires": wires, "bodies": bodies}
        return head | counted | lying | inside

    def place(self, node: Node) -> dict[str, Any]:
        """Where an op stands."""
        source = node.source
        found = {"at": str(source), "phase": self.names.phases[node.id]}
        return found | ({"scope": scope} if (scope := clean_scope(source.scope)) else {})


def line_data(source: Source) -> dict[str, Any]:
    """What is said of a user's line."""
    first, text = excerpt(source)
    return {"function": function_at(source), "first": first, "text": text}


def _thinned(xs: Sequence[float], course: Sequence[float]) -> list[float]:
    """One of so many next to each other, that at which the course is highest."""
    size = -(-len(course) // MOST_POINTS)
    parts = (range(at, min(at + size, len(course))) for at in range(0, len(course), size))
    return [xs[max(part, key=course.__getitem__)] for part in parts]


def _version(version: Version) -> list[Any]:
    value, nd = version
    return [value, format_sbp(nd)]


def json_text(data: Any) -> str:
    """Data as JSON, programs with a line per step."""
    programs: list[str] = []

    def apart(x: Any, key: str = "") -> Any:
        if key == "program" and isinstance(x, dict):
            programs.append("\n".join(_lines(x)))
            return f"@program {len(programs) - 1}@"
        if isinstance(x, dict):
            return {k: apart(v, k) for k, v in x.items()}
        return [apart(v) for v in x] if isinstance(x, list | tuple) else x

    text = json.dumps(apart(data), indent=1)
    for k, program in enumerate(programs):
        text = text.replace(f'"@program {k}@"', program)
    return text + "\n"


def _lines(program: dict[str, Any]) -> Iterator[str]:
    yield "{"
    for i, (key, x) in enumerate(program.items()):
        more = "," if i + 1 < len(program) else ""
        if key == "steps":
            yield f'"{key}": ['
            yield ",\n".join(map(json.dumps, x))
            yield f"]{more}"
        else:
            yield f'"{key}": {json.dumps(x)}{more}'
    yield "}"


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
        if not self.takes.hides:
            found = [self._one_by_one(steps) for steps in loop.bodies]
        else:
            found = [
                self._trip(x, body) for x, body in zip(trips_of(loop, self.takes), loop.bodies, strict=True)
            ]
        for k, trip in enumerate(found):
            course = self.takes.trip_course(loop, k)
            trip["held"] = [list(course.seconds), list(course.bytes)]
        return found

    def _trip(self, trip: Trip, body: Sequence[Step]) -> dict[str, Any]:
        number = {id(step): i for i, step in enumerate(body)}
        kernels, sent = list[list[Any]](), list[list[Any]]()
        for j, start, end, sends in trip.schedule_times(self.takes).spans:
            steps = trip.steps_of(j)
            if sends:
                sent.append([start, end, self._rows_of(steps)])
            else:
                kernels.append([start, end, number[id(steps[0])]])
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
