"""How the tensors of a step lie on the devices of a stage: a placement, and signatures by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import sbp
from benchmarks.published.model import Leaf
from benchmarks.published.rows import Layout, RowError
from sbp import B, P, S
from sbp.placement import Placement
from sbp.signature import NdSbp, Signature

Way = Literal["copy", "shard", "width"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the placement.

    Arguments:
      name: the column that it comes from.
      way: what it does to ordinary weights: holds copies of them, cuts them to be gathered when they are
        used, or splits their width.
    """

    name: str
    size: int
    way: Way


@dataclass(frozen=True)
class Lying:
    """How tensors lie along the axes of one stage's devices, outer to inner: dp, fsdp, ep, cp, tp.

    That is the order of ranks in Megatron and in MaxText: tensor parallel devices are neighbours.

    Arguments:
      kind: the chip, a name of the catalogue.
      ways: the layout of the row.
      sequence_parallel: whether tensor parallel devices share the sequence between products; else each has
        all of it.
    """

    kind: str
    ways: Layout
    sequence_parallel: bool = True

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Those with more than one device; one of one device if there is none."""
        w = self.ways
        inside_fsdp = self._inside_fsdp
        if not inside_fsdp and w.dp % w.ep:
            raise RowError(f"{w.ep} expert ranks do not lie inside dp {w.dp} or fsdp {w.fsdp}")
        dp, fsdp = (w.dp, w.fsdp // w.ep) if inside_fsdp else (w.dp // w.ep, w.fsdp)
        found = (
            Axis("dp", dp, "copy"),
            Axis("fsdp", fsdp, "shard"),
            Axis("ep", w.ep, "shard" if inside_fsdp else "copy"),
            Axis("cp", w.cp, "shard" if w.fsdp > 1 else "copy"),
            Axis("tp", w.tp, "width"),
        )
        return tuple(a for a in found if a.size > 1) or (Axis("dp", 1, "copy"),)

    @property
    def _inside_fsdp(self) -> bool:
        """Whether expert ranks lie inside those of fsdp, not of dp."""
        return self.ways.fsdp > 1 and self.ways.fsdp % self.ways.ep == 0

    @property
    def one_copy(self) -> Lying:
        """The devices that have a word for each other during the passes: without copies of the whole."""
        ways = replace(self.ways, dp=1 if self._inside_fsdp else self.ways.ep)
        return replace(self, ways=ways)

    @property
    def placement(self) -> Placement:
        """The devices of the first stage: neighbours, as those of every stage are."""
        return sbp.placement(
            self.kind, shape=tuple(a.size for a in self.axes), axes=tuple(a.name for a in self.axes)
        )

    def tokens(self) -> NdSbp:
        """Of `b s`."""
        found: dict[str, Signature] = {"cp": S(1), "tp": B}
        return tuple(found.get(a.name, S(0)) for a in self.axes)

    def activations(self) -> NdSbp:
        """Of `b s d`: batch and sequence split (Megatron's sequence parallel)."""
        found: dict[str, Signature] = {"cp": S(1), "tp": S(1) if self.sequence_parallel else B}
        return tuple(found.get(a.name, S(0)) for a in self.axes)

    @property
    def groups(self) -> int:
        """Into how many parts a sequence is split between layers."""
        return self.ways.cp * (self.ways.tp if self.sequence_parallel else 1)

    # -- weights

    def used(self, leaf: Leaf) -> NdSbp:
        """Where a product takes a weight: its width is split, the rest gathered."""
        return tuple(self._fixed(a, leaf) or B for a in self.axes)

    def kept(self, leaf: Leaf) -> NdSbp:
        """Between uses within a step: also cut along the axes that cut weights."""
        return self._cut(leaf, ("shard",), B)

    def gradient(self, leaf: Leaf) -> NdSbp:
        """What micro-batches add up: sums over copies wait for the end of the step."""
        return self._cut(leaf, ("shard",), P)

    def vector(self, expert: bool) -> VectorLying:
        """How all weights as one vector lie, those of experts or all others."""

        def cuts(a: Axis) -> bool:
            return a.way != "copy" or (expert and a.name == "ep")

        # Where nothing gathers weights for each use, copies share the optimizer's state (ZeRO-1).
        shared = self.ways.fsdp == 1
        copies = prod(a.size for a in self.axes if not cuts(a))
        return VectorLying(
            copies=copies,
            parts=self.placement.size // copies,
            gradients=tuple(S(1) if cuts(a) else S(0) for a in self.axes),
            at_rest=tuple(S(0) if cuts(a) else S(1) if shared else B for a in self.axes),
            used=tuple(S(0) if cuts(a) else B for a in self.axes),
        )

    def _fixed(self, axis: Axis, leaf: Leaf) -> Signature | None:
        """The split that a weight has along an axis by its meaning."""
        if axis.name == "ep" and leaf.expert:
            return S(0)
        if axis.way == "width" and leaf.width is not None and leaf.shape[leaf.width] % axis.size == 0:
            return S(leaf.width)
        return None

    def _cut(self, leaf: Leaf, ways: tuple[Way, ...], other: Signature) -> NdSbp:
        fixed = [self._fixed(a, leaf) for a in self.axes]
        cutting = prod(a.size for a, f in zip(self.axes, fixed, strict=True) if f is None and a.way in ways)
        taken = {f for f in fixed if f is not None}
        dims = [i for i, n in enumerate(leaf.shape) if n % cutting == 0 and S(i) not in taken]
        best = S(max(dims, key=lambda i: leaf.shape[i])) if dims else other
        return tuple(
            f if f is not None else best if a.way in ways else other
            for a, f in zip(self.axes, fixed, strict=True)
        )


@dataclass(frozen=True, slots=True)
class VectorLying:
    """How all weights of one kind lie as one vector for each part of the model that widths are cut into.

    The vector of a part is cut by copies, not the other way round: what is summed up over copies stays with
    the devices of its part.

    Arguments:
      copies: devices that have the same weights, and gradients of their own.
      parts: what the others of the stage have different ones of.
      gradients: of `copies parts n`.
      at_rest: of the optimizer's state and the weights in float32, `parts n`.
      used: of the weights in 16 bits, `parts n`.
    """

    copies: int
    parts: int
    gradients: NdSbp
    at_rest: NdSbp
    used: NdSbp
