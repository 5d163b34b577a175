"""Why a collective is there: one sentence, from what made the tensor lie so and from who wants it otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sbp.passes.graph import Const, Node, Source
from sbp.passes.moves import Move
from sbp.passes.physical import Box, Compute, Physical
from sbp.passes.plan.candidates import Strategy, pin_of
from sbp.signature import B, NdSbp, Partial, Split, format_sbp


@dataclass(frozen=True)
class Reasons:
    """Explains the moves of one physical program."""

    physical: Physical

    @cached_property
    def _made(self) -> Mapping[int, tuple[Node, Strategy]]:
        return {
            v: (s.node, s.strategy)
            for s in self.physical.steps
            if isinstance(s, Compute)
            for v in s.node.outputs
        }

    @cached_property
    def _nodes(self) -> Mapping[int, tuple[Node, Strategy]]:
        return {s.node.id: (s.node, s.strategy) for s in self.physical.steps if isinstance(s, Compute)}

    def source(self, box: Box) -> Source:
        """The line that caused the move: the op that left the sum, else the op that wants the tensor otherwise."""
        if isinstance(box.move.old, Partial):
            origin = self._origin(box)
            if origin is not None and origin[0].source.file:
                return origin[0].source
        wanted = self._nodes.get(box.user)
        if wanted is not None and wanted[0].source.file:
            return wanted[0].source
        made = self._made.get(box.value)
        return made[0].source if made is not None else Source()

    def reason(self, box: Box) -> str:
        """One sentence."""
        move = box.move
        axes = self._axes(move.axes)
        if isinstance(move.old, Partial):
            origin = self._origin(box)
            if origin is not None:
                node, text = origin
                return f"{node.op}: {text.format(axes=axes)}; {self._wants(box, move)}"
            return f"the value is a sum of parts over {axes}; {self._wants(box, move)}"
        if move.kind == "permute":
            return f"the same blocks lie on other devices; {self._wants(box, move)}"
        assert isinstance(move.old, Split)
        return f"dim {move.old.dim} is split over {axes}; {self._wants(box, move)}"

    def _axes(self, axes: tuple[int, ...]) -> str:
        return " and ".join(f"'{self.physical.placement.axes[a]}'" for a in axes)

    def _wants(self, box: Box, move: Move) -> str:
        """Who asked, and for what."""
        if box.user < 0:
            return f"result {-1 - box.user} leaves as {format_sbp(self.physical.outputs[-1 - box.user])}"
        node, strategy = self._nodes[box.user]
        if pin_of(node) is not None and node.op == "sbp_annotate":
            return f"{node.source if node.source.file else node.source.scope} is annotated {format_sbp(strategy.results[0])}"
        how = self._need(node, strategy, box.value, move)
        return f"{node.op} at {node.source} needs it {how}"

    def _need(self, node: Node, strategy: Strategy, value: int, move: Move) -> str:
        new = {
            nd[a]
            for x, nd in zip(node.inputs, strategy.operands, strict=True)
            if x == value
            for a in move.axes
        } or {move.new}
        if new == {B}:
            return "whole"
        splits = sorted(s.dim for s in new if isinstance(s, Split))
        return f"split by dim {splits[0]}" if splits else "otherwise"

    def _origin(self, box: Box) -> tuple[Node, str] | None:
        """The op that left the partial value: walks back through the ops that only passed it on."""
        value, axis, seen = box.value, box.move.axes[0], 0
        while value in self._made and seen < 10_000:
            node, strategy = self._made[value]
            if len(strategy.rows) <= axis:
                return None
            row = strategy.rows[axis]
            if row.reason:
                return node, row.reason
            partial = [
                x
                for x, s in zip(node.inputs, row.operands, strict=True)
                if isinstance(s, Partial) and not isinstance(x, Const)
            ]
            if not partial:
                return None
            value, seen = partial[0], seen + 1
        return None


