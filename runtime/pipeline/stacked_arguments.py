"""Arguments and results of a program whose scan over layers was cut: one array outside, parts inside.

A stacked leaf lies on the devices of all stages, split by layers along the stages' axis. Every stage takes
the shards of its own devices as its part, and the results of all stages form the next such array. Nothing is
copied where all stages plan the same signature.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import jax
from jax.sharding import NamedSharding

from sbp.compat.untyped import Leaf, partition_spec, struct
from sbp.errors import AnnotationError, Problem
from sbp.passes.pipeline.op_placement import placements_of
from sbp.passes.pipeline.unstack import LeafPart, UnstackedScan, layers_of, unstack
from sbp.passes.program.trace import TracedProgram
from sbp.passes.request import Asked, Signed, StagesRequest
from sbp.placement import Placement
from sbp.runtime.processes.addressable import array_of, relaid

AnyMesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclass(frozen=True)
class StackedLeaves:
    """Maps the leaves of a program to the parts in the program that was made of it.

    Arguments:
      whole: the placement of all stages, which lie along its first axis.
      unstacked_scan: the program that was made.
    """

    whole: Placement
    unstacked_scan: UnstackedScan

    def cut_leaves(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """The leaves of a call, with stacked leaves cut into parts."""
        return [self._part(leaves[p.leaf], p) for p in self.unstacked_scan.ins]

    def join(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """The results, with parts joined to stacked leaves."""
        return self._together(self.unstacked_scan.outs, parts)

    def join_placed(self, parts: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments, with parts joined, of leaves that lie under the wanted shardings."""
        return self._together(self.unstacked_scan.ins, parts)

    def ends(
        self, ins: Sequence[jax.ShapeDtypeStruct], outs: Sequence[jax.ShapeDtypeStruct]
    ) -> tuple[list[jax.ShapeDtypeStruct], list[jax.ShapeDtypeStruct]]:
        """Shapes and shardings of arguments and results, with parts joined."""

        def joined(
            of: Sequence[LeafPart], parts: Sequence[jax.ShapeDtypeStruct]
        ) -> list[jax.ShapeDtypeStruct]:
            groups: dict[int, list[jax.ShapeDtypeStruct]] = {}
            for p, x in zip(of, parts, strict=True):
                groups.setdefault(p.leaf, []).append(x)
            cut = {p.leaf for p in of if p.begin is not None}
            return [self._stacked(xs) if i in cut else xs[0] for i, xs in sorted(groups.items())]

        return joined(self.unstacked_scan.ins, ins), joined(self.unstacked_scan.outs, outs)

    def _stacked(self, parts: Sequence[jax.ShapeDtypeStruct]) -> jax.ShapeDtypeStruct:
        """The stack of such parts, made by a compiled function."""
        first = parts[0].sharding
        assert isinstance(first, NamedSharding)
        shape = (sum(x.shape[0] for x in parts), *parts[0].shape[1:])
        return struct(shape, parts[0].dtype, sharding=self._whole(first))

    def _whole(self, first: NamedSharding) -> NamedSharding:
        """The sharding of a stacked leaf on all stages, from that of its first part."""
        inside = _names(first.spec[0]) if len(first.spec) else []
        return _moved(first, self.whole.mesh, [self.whole.axes[0], *inside])

    def _part(self, x: Leaf, part: LeafPart) -> Leaf:
        if part.begin is None or part.end is None:
            return x
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and self._is_ours(x.sharding):
            stage = self.whole.split(0)[part.begin // self.unstacked_scan.layers[0]]
            inner = _moved(x.sharding, stage.mesh, [*_names(x.sharding.spec[0])[1:]])
            held = {s.device: s.data for s in x.addressable_shards}
            shards = [held[d] for d in inner.mesh.devices.flat if d in held]
            return array_of((part.end - part.begin, *x.shape[1:]), inner, shards, x.dtype)
        return x[part.begin : part.end]

    def _is_ours(self, sharding: NamedSharding) -> bool:
        """Whether an array is split by layers along the stages' axis, as `join` gives it."""
        spec = sharding.spec
        return bool(
            sharding.mesh == self.whole.mesh
            and len(spec)
            and _names(spec[0])[:1] == [self.whole.axes[0]]
            and len(set(self.unstacked_scan.layers)) == 1
        )

    def _together(self, of: Sequence[LeafPart], parts: Sequence[jax.Array]) -> list[jax.Array]:
        groups: dict[int, list[jax.Array]] = {}
        for p, x in zip(of, parts, strict=True):
            groups.setdefault(p.leaf, []).append(x)
        cut = {p.leaf for p in of if p.begin is not None}
        return [self._stack(xs) if i in cut else xs[0] for i, xs in sorted(groups.items())]

    def _stack(self, parts: Sequence[jax.Array]) -> jax.Array:
        first, *_ = lying = [x.sharding for x in parts if isinstance(x.sharding, NamedSharding)]
        inside = _names(first.spec[0]) if len(first.spec) else []
        # Stages are planned one by one; an array has one signature for all of them.
        alike = [
            x if at.spec == first.spec else relaid(x, _moved(first, at.mesh, inside))
            for x, at in zip(parts, lying, strict=True)
        ]
        whole = self._whole(first)
        held = {s.device: s.data for x in alike for s in x.addressable_shards}
        shards = [held[d] for d in whole.mesh.devices.flat if d in held]
        shape = (sum(x.shape[0] for x in parts), *parts[0].shape[1:])
        return array_of(shape, whole, shards, parts[0].dtype)

    # -- what was asked of the leaves

    def request(self, of_whole: StagesRequest) -> StagesRequest:
        """The user's request, for the program that was made."""
        return replace(
            of_whole,
            layers=self.unstacked_scan.layers,
            signatures=self.part_signatures(of_whole.signatures),
            ties=self.ties(of_whole.ties),
            donated=self.donated_parts(of_whole.donated),
        )

    def part_signatures(self, of_whole: Asked) -> Asked:
        """The user's signatures of leaves, for their parts."""

        def asked(placement: Placement, given: Sequence[int], back: Sequence[int]) -> tuple[Signed, Signed]:
            ins = [self.unstacked_scan.ins[i].leaf for i in given]
            return of_whole(placement, ins, [self.unstacked_scan.outs[i].leaf for i in back])

        return asked

    def ties(self, of_whole: Sequence[int | None]) -> tuple[int | None, ...]:
        """The argument that each result becomes: a part becomes the part of the same layers."""
        at = {p: i for i, p in enumerate(self.unstacked_scan.ins)}
        found = []
        for p in self.unstacked_scan.outs:
            tied = of_whole[p.leaf]
            found.append(None if tied is None else at.get(replace(p, leaf=tied)))
        return tuple(found)

    def donated_parts(self, of_whole: Sequence[int]) -> tuple[int, ...]:
        """The positions of the parts of donated leaves."""
        return tuple(i for i, p in enumerate(self.unstacked_scan.ins) if p.leaf in of_whole)


def stacked_leaves(traced: TracedProgram, placement: Placement, stages: int) -> StackedLeaves | None:
    """A program cut into stages along the first axis; None if it has no scan over layers, or marks stages.

    Raises:
      AnnotationError: if the layers are no multiple of the stages, or a placement has several stages.
    """
    layers = None if placements_of(traced.graph) else layers_of(traced.graph)
    if layers is None:
        return None
    if layers % stages or stages != placement.shape[0]:
        raise AnnotationError(_uneven(placement, stages, layers))
    return StackedLeaves(placement, unstack(traced, [layers // stages] * stages))


def _uneven(placement: Placement, stages: int, layers: int) -> Problem:
    count, axis = placement.shape[0], placement.axes[0]
    return Problem(
        "annotation",
        f"PipelineOptions(stages={stages})",
        f"a scan over {layers} layers, {count} placements along {axis!r}",
        "a stage per placement, and layers that are a multiple of the stages",
        "the weights of all layers come back as one array, split by layers along that axis",
        f"a first axis of {any_of(n for n in range(2, layers + 1) if layers % n == 0)}, or layers one by one",
    )


def any_of(numbers: Iterable[int]) -> str:
    """Some numbers in words.

    >>> any_of([2]), any_of([2, 4, 8])
    ('2', '2, 4 or 8')
    """
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last


def _names(entry: object) -> list[str]:
    """The axes that split one dim of an array."""
    if entry is None:
        return []
    return [entry] if isinstance(entry, str) else list(entry)  # type: ignore[call-overload]


def _moved(sharding: NamedSharding, mesh: AnyMesh, first: Sequence[str]) -> NamedSharding:
    """The same sharding on another mesh, with dim 0 split over other axes."""
    return NamedSharding(mesh, partition_spec((tuple(first) or None), *sharding.spec[1:]))
