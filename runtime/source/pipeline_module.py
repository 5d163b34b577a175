"""A plan with stages as a Python module: functions of pieces, tables of what these read and send, a loop.

What runs is what the pipeline runs (runtime/pipeline/pipeline_executor.py): the same pieces, in the same
order per placement, and `jax.device_put` between them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sbp.errors import ArgumentError, Problem
from sbp.passes.explain.plan import Collective, PlanData
from sbp.passes.pipeline.slots import How, Piece, Slot
from sbp.passes.pipeline.stages import Stages
from sbp.passes.pipeline.times import ways
from sbp.passes.program.role import Phase
from sbp.passes.render.program_source import ProgramSource
from sbp.runtime.source import loop_text
from sbp.runtime.source.device import DeviceProgram, DeviceWriter
from sbp.runtime.source.line_wrapping import WIDTH, comment, fill_lines, statement
from sbp.runtime.source.module import head, mesh
from sbp.runtime.source.names import identifier
from sbp.runtime.source.specs import mesh_axes
from sbp.runtime.source.stage_placements import EACH, WORDS, StageNames, StagePlace, in_order
from sbp.runtime.source.text import GivenThings
from sbp.runtime.source.tracing import trace_piece
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

_LETTERS = {Phase.FORWARD: "F", Phase.INPUT: "I", Phase.WEIGHT: "W"}
_MANY = 24
"""Leaves of arguments or results that do not have a line each."""


def write_staged(plan: PlanData, whole: bool = True) -> ProgramSource:
    """The source of a plan with stages.

    Arguments:
      whole: whether each argument of the function is one of its stages' arguments, and not layers of several.

    Raises:
      ArgumentError: for a plan whose stages are cut out of a scan.
    """
    if not whole:
        got, legal = (
            "stages that are cut out of a scan over layers",
            "stages that the model marks with sbp.on",
        )
        why = "the weights of all layers are one argument, which belongs to no single stage"
        fix = "plan.stages[0].source(), and print(plan.schedule)"
        raise ArgumentError(Problem("argument", "Plan.source", got, legal, why, fix))
    return StagedModule(plan, plan.program_stages).source()


@dataclass
class StagedModule:
    """Writes the module of one plan."""

    plan: PlanData
    stages: Stages
    objects: GivenThings = field(default_factory=GivenThings)

    @cached_property
    def is_backward_one(self) -> bool:
        """Whether a backward pass is one piece."""
        return self.plan.schedule is None or not self.plan.schedule.splits

    @cached_property
    def places(self) -> list[StagePlace]:
        """The placements."""
        return StageNames(self.plan, self.stages, self.is_backward_one).all

    @cached_property
    def _constants(self) -> Sequence[object]:
        return self.stages.traced.graph.consts

    def label(self, place: StagePlace, piece: Piece) -> str:
        """What a piece is called in the tables: as the schedule calls it, or by when it runs once."""
        phase, at = piece.part.phase, piece.part.at
        if phase in _LETTERS:
            return f"{'B' if self.is_backward_one and phase is Phase.INPUT else _LETTERS[phase]}{at}"
        return self.function(place, piece)

    def function(self, place: StagePlace, piece: Piece) -> str:
        """The name of its function."""
        phase, at = piece.part.phase, piece.part.at
        if phase in _LETTERS:
            return f"{WORDS[phase]}_{at}"
        alone = sum(p.part.phase == phase for p in place.cut.pieces) == 1
        return f"{WORDS[phase]}_on_{place.number}" + ("" if alone else f"_{at}")

    def source(self) -> ProgramSource:
        """The module, and what it must be given."""
        name = identifier(self.plan.name)
        own = {self.function(p, piece) for p in self.places for piece in p.cut.pieces}
        writer = DeviceWriter(self.objects, {name, *own, *loop_text.NAMES})
        parts = [*self._meshes(), "", *self._lies()]
        for place in self.places:
            for piece in in_order(place.cut):
                parts += self._function(writer, place, piece)
        parts += ["", "", *loop_text.PIECE.split("\n"), *self._pieces(), "", *self._sends()]
        parts += ["", *self._ends(), "", *self._schedule()]
        scheduled = self.plan.schedule is not None
        parts += ["", *loop_text.run_functions(scheduled), "", "", *loop_text.entry(name, scheduled)]
        body = "\n".join(parts)
        text = head(self._claim(), body) + body + "\n"
        return ProgramSource(name, text, dict(self.objects.things), tuple(self._constants))

    def _meshes(self) -> Iterator[str]:
        """The devices of every placement."""
        yield "MESHES = ("
        for place in self.places:
            yield from statement("", mesh(place.cut.physical.placement), 4, ",")
        yield ")"

    def _lies(self) -> Iterator[str]:
        """How what is on a placement lies there."""
        yield "LIES = ("
        for place in self.places:
            yield f"    {{  # on placement {place.number}"
            ends = {*place.cut.arguments, *place.cut.closure, *place.cut.results}
            groups: dict[str, list[str]] = {}
            for slot in place.names if len(ends) > _MANY else ():
                if slot in ends and slot.value >= 0:
                    groups.setdefault(mesh_axes(place.slot_layout.spec(slot)), []).append(place.names[slot])
            for spec, names in groups.items():
                yield from statement("**", f"dict.fromkeys({_names(names)}, {spec})", 8, ",")
            grouped = {n for names in groups.values() for n in names}
            for slot, name in place.names.items():
                if name not in grouped:
                    yield from self._lying(place, slot, name)
            yield "    },"
        yield ")"

    def _lying(self, place: StagePlace, slot: Slot, name: str) -> list[str]:
        if slot.value < 0:
            return statement(f'"{name}": ', "PartitionSpec()", 8, ",")
        kind = f"{place.slot_layout.dtype(slot)}[{', '.join(map(str, slot.shape(place.cut.physical.graph)))}]"
        packed = ", shards stacked" if place.slot_layout.is_packed(slot) else ""
        *before, line = statement(f'"{name}": ', mesh_axes(place.slot_layout.spec(slot)), 8, ",")
        note = f"  # {kind} {format_sbp(slot.nd)}{packed}"
        return [*before, line + (note if len(line) + len(note) <= WIDTH else "")]

    def _function(self, writer: DeviceWriter, place: StagePlace, piece: Piece) -> list[str]:
        plan, microbatches = self.plan.stages[place.number], self.stages.microbatches
        names = ["microbatch"]
        for r in piece.reads:
            name = place.names[r.slot].removesuffix(EACH)
            names += [f"{name}_{k}" for k in range(microbatches)] if r.how is How.STACK else [name]
        traced = trace_piece(place.slot_layout, piece, microbatches)
        paths = plan.in_paths, plan.out_paths
        program = DeviceProgram(traced, place.cut.physical, paths, names, numbered=True)
        rows = {c.name: c for c in plan.collectives if c.name}
        return writer.functions(program, self.function(place, piece), rows, self._doc(place, piece))

    def _doc(self, place: StagePlace, piece: Piece) -> str:
        phase, at = piece.part.phase, piece.part.at
        words = {
            Phase.BEFORE: "What runs before the micro-batches",
            Phase.FORWARD: f"The forward pass of stage {at} for a micro-batch",
            Phase.INPUT: f"The backward pass of stage {at} for a micro-batch",
            Phase.WEIGHT: f"The gradients of the weights of stage {at} for a micro-batch",
            Phase.AFTER: "What runs after the micro-batches",
        }
        if phase is Phase.INPUT and not self.is_backward_one:
            words[phase] = f"What other stages wait for of the backward pass of stage {at}"
        return f"{words[phase]}, on a device of placement {place.number}."

    def _pieces(self) -> Iterator[str]:
        """What every piece reads and makes."""
        yield "PIECES = {"
        for place in self.places:
            for piece in in_order(place.cut):
                reads = _names(place.read(r.slot, r.how) for r in piece.reads)
                makes = _names(place.names[w.slot] for w in piece.writes)
                call = f"Piece({place.number}, {self.function(place, piece)}, {reads}, {makes})"
                yield from statement(f'"{self.label(place, piece)}": ', call, 4, ",")
        yield "}"

    def _sends(self) -> Iterator[str]:
        """What is sent when a piece has run, and what is fetched once."""
        receivers: dict[str, list[tuple[str, str]]] = {}
        fetched = []
        for place in self.places:
            for v, slot in place.cut.micro_receives.items():
                source = next(p for p in self.places if v in p.cut.micro_sends)
                out = source.cut.micro_sends[v]
                piece = next(x for x in source.cut.pieces if any(w.slot == out for w in x.writes))
                one = f'("{source.names[out]}", {place.number}, "{place.names[slot]}")'
                label = self.label(source, piece)
                receivers.setdefault(label, []).append((one, self._way(v, source, place)))
            for v, slot in place.cut.receives.items():
                source = next(p for p in self.places if v in p.cut.sends)
                one = f'({source.number}, "{source.names[source.cut.sends[v]]}")'
                fetched.append((f'({place.number}, "{place.names[slot]}"): ', one))
        yield loop_text.SENDS
        yield "SENDS = {" if receivers else "SENDS = {}"
        order = [self.label(p, piece) for p in self.places for piece in in_order(p.cut)]
        for label in sorted(receivers, key=order.index):
            some = receivers[label]
            yield f'    "{label}": ['
            for one, why in some:
                yield from [*comment(why, 8), f"        {one},"]
            yield "    ],"
        yield from ["}"] if receivers else []
        yield from ("", loop_text.FETCHED)
        yield "FETCHED = {" if fetched else "FETCHED = {}"
        for key, one in fetched:
            yield from statement(key, one, 4, ",")
        yield from ["}"] if fetched else []

    def _way(self, v: int, source: StagePlace, target: StagePlace) -> str:
        """The row of the plan for what is sent, as a comment."""
        c = self._rows[v, source.number, target.number]
        sent = f"{bytes_text(c.wire_bytes / c.count)} sent, {seconds_text(c.seconds / c.count)}"
        return f"{sent}: {c.reason}, at {c.source}"

    @cached_property
    def _rows(self) -> Mapping[tuple[int, int, int], Collective]:
        """The rows of the plan for what is sent, by value and placements."""
        found = ways(self.stages, self.stages.cuts(self.is_backward_one))
        return {(w.value, w.source, w.target): c for w, c in zip(found, self.plan.sends, strict=True)}

    def _ends(self) -> Iterator[str]:
        """Where arguments go, and where results are."""
        inputs = [*self.stages.traced.in_paths, *(f"constant {k}" for k in range(len(self._constants)))]
        goes: list[list[str]] = [[] for _ in inputs]
        comes: dict[int, str] = {}
        for p in self.places:
            for i, slot in (
                *zip(p.cut.subgraph.arguments, p.cut.arguments, strict=True),
                *zip(p.cut.subgraph.closure, p.cut.closure, strict=True),
            ):
                goes[i].append(f'({p.number}, "{p.names[slot]}")')
            for i, slot in zip(p.cut.subgraph.results, p.cut.results, strict=True):
                comes[i] = f'({p.number}, "{p.names[slot]}")'
        yield loop_text.ARGUMENTS
        yield "ARGUMENTS = ("
        yield from _table([f"({', '.join(some)}{',' if len(some) == 1 else ''})," for some in goes], inputs)
        yield from (")", "", loop_text.RESULTS, "RESULTS = (")
        paths = self.stages.traced.out_paths
        yield from _table([f"{comes[i]}," for i in range(len(paths))], paths)
        yield ")"

    def _once(self, phase: Phase) -> str:
        todo = [
            (piece.part.at, p.number, self.label(p, piece))
            for p in self.places
            for piece in p.cut.pieces
            if piece.part.phase == phase
        ]
        return _names(label for _, _, label in sorted(todo))

    def _schedule(self) -> Iterator[str]:
        """What runs, in which order."""
        yield from statement("BEFORE = ", self._once(Phase.BEFORE), 0)
        yield from statement("AFTER = ", self._once(Phase.AFTER), 0)
        schedule = self.plan.schedule
        if schedule is None:
            return
        yield f"MICROBATCHES = {schedule.microbatches}"
        yield f"SCHEDULE = (  # {schedule.name}: {loop_text.ACTIONS}"
        for order in schedule.orders:
            rows = list(_rows([f"{a.kind}{a.stage}:{a.microbatch}" for a in order], WIDTH - 8))
            yield from (f'    "{row} "' for row in rows[:-1])
            yield f'    "{rows[-1]}",'
        yield ")"

    def _claim(self) -> str:
        plan, count = self.plan, len(self.plan.stages)
        rows = sum(c.count for c in plan.collectives) - sum(c.count for c in plan.sends)
        what = f"{count} placements, {rows} collectives and {sum(c.count for c in plan.sends)} sends per step"
        order = ""
        if plan.schedule is not None:
            order = f", {plan.schedule.microbatches} micro-batches by {plan.schedule.name}"
        return (
            f"{plan.name} on {plan.placement}, as sbp has planned it: {what}{order}, "
            f"{bytes_text(plan.wire_bytes)} sent per device; {seconds_text(plan.step_seconds)} per step, "
            "estimated."
        )


def _names(names: Iterable[str]) -> str:
    """A tuple of strings, as code."""
    found = [f'"{n}"' for n in names]
    return f"({', '.join(found)}{',' if len(found) == 1 else ''})"


def _table(entries: Sequence[str], paths: Sequence[str]) -> Iterator[str]:
    """Entries of a table, each with its path; many without, several to a line: their names say enough."""
    if len(entries) > _MANY:
        yield from fill_lines(entries, 4)
        return
    for entry, path in zip(entries, paths, strict=True):
        line = f"    {entry}  # {path}"
        yield line if len(line) <= WIDTH else f"    {entry}"


def _rows(words: Sequence[str], width: int) -> Iterator[str]:
    """Words, as many to a row as fit."""
    row = ""
    for word in words:
        if row and len(row) + 1 + len(word) > width:
            yield row
            row = ""
        row = f"{row} {word}" if row else word
    yield row
