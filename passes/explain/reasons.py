"""Why a collective is there: what made the tensor lie so, and who wants it otherwise, in one sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from sbp.communication.protocol import Communication
from sbp.passes.boxing.moves import Move
from sbp.passes.physical.program import Border, Box, Compute, Flow, Physical, Version
from sbp.passes.plan.candidates import Strategy, pin_of
from sbp.passes.program.control import ports
from sbp.passes.program.graph import Const, Node, Source
from sbp.passes.program.names import Names, loop_name
from sbp.rules import Row
from sbp.signature import B, Partial, Split, format_sbp

REDUCES = {
    "sum": "sums over",
    "max": "takes the maximum over",
    "min": "takes the minimum over",
    "prod": "multiplies over",
    "and": "takes the bitwise and over",
    "or": "takes the bitwise or over",
    "xor": "takes the bitwise exclusive or over",
}
# How the rules say that letters of their notation are contracted; said with dims and sizes here.
CONTRACTED = "is reduced here and split over {axes}"
_Origin: TypeAlias = tuple[int, str] | None
"""How many ops away, and the name of, the argument that a split comes from."""


@dataclass(frozen=True)
class Reasons:
    """Explains the moves of one physical program.

    Arguments:
      physical: the program.
      names: the words for its tensors and ops.
    """

    physical: Physical
    names: Names

    @cached_property
    def _flow(self) -> Flow:
        return Flow(self.physical)

    @cached_property
    def _splits(self) -> Mapping[Version, tuple[_Origin, ...]]:
        """Per version of a value and per axis: the nearest argument whose split it carries on."""
        found: dict[Version, tuple[_Origin, ...]] = {}
        for v, nd in zip(self.physical.graph.inputs, self.physical.inputs, strict=True):
            found[v, nd] = tuple((0, self.names.of(v)) if isinstance(s, Split) else None for s in nd)
        unknown: tuple[_Origin, ...] = (None,) * self.physical.placement.ndim
        for step, _ in self.physical.walk():
            if isinstance(step, Border):
                for port, nd in zip(ports(step.node), step.inner_signatures, strict=True):
                    x = None if port.operand is None else step.node.inputs[port.operand]
                    outside = found.get((x, port.outer(nd)), unknown) if isinstance(x, int) else unknown
                    found.update({(v, nd): outside for v in port.enters})
                    if port.result is not None:
                        found[step.node.outputs[port.result], port.outer(nd)] = outside
                continue
            if isinstance(step, Box):
                old = found[step.value, step.move.before]
                pairs = zip(old, step.move.before, step.move.after, strict=True)
                carried = tuple(o if b == a else None for o, b, a in pairs)
                found.setdefault((step.value, step.move.after), carried)
                continue
            carried = self._carried(step.node, step.strategy, found)
            found.update(dict.fromkeys(zip(step.node.outputs, step.strategy.results, strict=True), carried))
        return found

    def _carried(
        self, node: Node, strategy: Strategy, found: Mapping[Version, tuple[_Origin, ...]]
    ) -> tuple[_Origin, ...]:
        """Per axis, the nearest of the arguments that the operands' splits come from."""
        pairs = zip(node.inputs, strategy.operands, strict=True)
        near = [(found[x, nd], nd) for x, nd in pairs if not isinstance(x, Const)]

        def along(axis: int) -> _Origin:
            origins = [o for each, nd in near if (o := each[axis]) is not None and nd[axis] != B]
            if not origins:
                return None
            hops, name = min(origins)
            return (hops + 1, name) if name else None

        return tuple(map(along, range(self.physical.placement.ndim)))

    def source(self, box: Box) -> Source:
        """The line that caused the move: of the op that left the sum, else of the op that asked for it."""
        if isinstance(box.move.old, Partial):
            origin = self._origin(box)
            if origin is not None and origin[0].source.file:
                return origin[0].source
        wanted = self._flow.computations.get(box.user)
        if wanted is not None and wanted[0].source.file:
            return wanted[0].source
        made = self._flow.makers.get(box.value) or self._flow.makers.get(self._flow.across.get(box.value, -1))
        border = self._flow.borders.get(box.user)
        return made[0].source if made is not None else border.source if border is not None else Source()

    def cause(self, box: Box) -> str:
        """The argument whose split leads to the move, the nearest of several; "" for none."""
        move, own = box.move, self.names.of(box.value)
        if isinstance(move.old, Partial):
            origin = self._origin(box)
            every = () if origin is None else self._carried(*origin[:2], self._splits)
        else:
            every = self._splits.get((box.value, move.before), ())
        found = [every[a] for a in move.axes] if every else []
        return min((o for o in found if o is not None and o[1] != own), default=(0, ""))[1]

    def inner_reason(self, step: Compute, communication: Communication) -> str:
        """One sentence on a collective inside an op."""
        x, nd = step.node.inputs[communication.operand], step.strategy.operands[communication.operand]
        splits = self._splits.get((x, nd), ()) if not isinstance(x, Const) else ()
        return f"{step.node.op}: {communication.reason.format(axes=self._over(communication.axes, splits))}"

    def reason(self, box: Box) -> str:
        """One sentence."""
        return f"{self._lies(box)}; {self._wants(box)}"

    def _lies(self, box: Box) -> str:
        """Why the tensor lies as it does."""
        move = box.move
        if isinstance(move.old, Partial):
            origin = self._origin(box)
            if origin is None:
                return f"the value is a sum of parts over {self._over(move.axes)}"
            return self._reduces(*origin, move.axes)
        if move.kind == "permute":
            return "the same blocks lie on other devices"
        assert isinstance(move.old, Split)
        own = self.names.of(box.value)
        splits = [o if o is None or o[1] != own else None for o in self._splits[box.value, move.before]]
        return f"dim {move.old.dim} is split over {self._over(move.axes, splits)}"

    def _reduces(self, node: Node, strategy: Strategy, row: Row, axes: tuple[int, ...]) -> str:
        """How an op came to leave a sum."""
        over = self._over(axes, self._carried(node, strategy, self._splits))
        if not row.reason.endswith(CONTRACTED):
            return f"{node.op}: {row.reason.format(axes=over)}"
        i, dim = next((i, s.dim) for i, s in enumerate(row.operands) if isinstance(s, Split))
        size = self.physical.graph.operand(node.inputs[i]).shape[dim]
        op = next(s.op for s in row.results if isinstance(s, Partial))
        return f"{node.op} {REDUCES[op]} dim {dim} (size {size}), which is split over {over}"

    def _over(self, axes: Sequence[int], splits: Sequence[_Origin] = ()) -> str:
        """The axes, each with the argument that its split comes from, where that is known."""
        names = [f"'{self.physical.placement.axes[a]}'" for a in axes]
        as_ = [f" as {s[1]} is" if (s := splits[a] if splits else None) is not None else "" for a in axes]
        if len(set(as_)) == 1:
            return " and ".join(names) + as_[0]
        return " and ".join(f"{n} ({a.strip()})" if a else n for n, a in zip(names, as_, strict=True))

    def _wants(self, box: Box) -> str:
        """Who asked, and for what."""
        if box.user < 0:
            i = -1 - box.user
            name = self.names.out_paths[i] if i < len(self.names.out_paths) else f"result {i}"
            return f"{name} leaves as {format_sbp(self.physical.outputs[i])}"
        if box.user in self._flow.borders:
            border = self._flow.borders[box.user]
            who = self._reader(box.value) or f"{loop_name(border)} at {border.source}"
            return f"{who} takes it as {format_sbp(box.move.after)}"
        node, strategy = self._flow.computations[box.user]
        if pin_of(node) is not None:
            where = node.source if node.source.file else node.source.scope
            return f"{where} is annotated {format_sbp(strategy.results[0])}"
        how = self._need(node, strategy, box.value, box.move)
        who = "the update" if self.names.phases[node.id] == "update" else node.op
        return f"{who} at {node.source} needs it {how}"

    def _reader(self, value: int) -> str | None:
        """Who gets a value that leaves a loop for another placement, such as "stage 1"."""
        paths = dict(zip(self.physical.graph.outputs, self.names.out_paths, strict=False))
        found = (paths.get(y, "") for y, x in self._flow.across.items() if x == value)
        return next((path[3:].split(":")[0] for path in found if path.startswith("to ")), None)

    def _need(self, node: Node, strategy: Strategy, value: int, move: Move) -> str:
        pairs = zip(node.inputs, strategy.operands, strict=True)
        new = {nd[a] for x, nd in pairs if x == value for a in move.axes} or {move.new}
        if new == {B}:
            return "whole"
        splits = sorted(s.dim for s in new if isinstance(s, Split))
        return f"split by dim {splits[0]}" if splits else "otherwise"

    def _origin(self, box: Box) -> tuple[Node, Strategy, Row] | None:
        """The op that left the partial value: walks back through the ops that only passed it on."""
        value, axis, seen = box.value, box.move.axes[0], set[int]()
        while value not in seen and (value in self._flow.makers or value in self._flow.across):
            seen.add(value)
            if value not in self._flow.makers:
                value = self._flow.across[value]
                continue
            node, strategy = self._flow.makers[value]
            if len(strategy.rows) <= axis:
                return None
            row = strategy.rows[axis]
            if row.reason:
                return node, strategy, row
            pairs = zip(node.inputs, row.operands, strict=True)
            partial = [x for x, s in pairs if isinstance(s, Partial) and not isinstance(x, Const)]
            if not partial:
                return None
            value = partial[0]
        return None
