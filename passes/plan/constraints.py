"""Annotations by the names of axes, JAX's own words among them, as signatures on a placement.

`with_sharding_constraint`, `jax.reshard`, `out_sharding=` and a `PartitionSpec` in `sbp.annotate` name axes
of a mesh. Here the placement is known that has these axes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sbp.annotation import OWN, Pin
from sbp.errors import Problem
from sbp.layout import on_wide_axes
from sbp.notation.named_axes import Levels, NamedSignature
from sbp.passes.plan.candidates import pin_of
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Graph, Node, Source
from sbp.passes.program.trace import TracedProgram
from sbp.placement import Placement
from sbp.signature import B, NdSbp

MOST_LINES = 4


@dataclass(frozen=True, slots=True)
class IgnoredConstraint:
    """A constraint that was left out.

    Arguments:
      words: what said it, such as "reshard".
      source: the user's line.
      signature: what it asked for.
    """

    words: str
    source: Source
    signature: NamedSignature

    def __str__(self) -> str:
        return f"{self.words} at {self.source}, {self.signature}"


@dataclass(frozen=True, slots=True)
class ConstrainedGraph:
    """A program whose annotations are signatures.

    Arguments:
      traced: the program.
      problems: what is wrong with annotations; they are left out.
      notes: what says nothing.
      ignored_constraints: constraints that were left out because it was asked for.
    """

    traced: TracedProgram
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    ignored_constraints: tuple[IgnoredConstraint, ...] = ()


def apply_constraints(
    traced: TracedProgram, placement: Placement, stage: Placement | None, follow: Callable[[Source], bool]
) -> ConstrainedGraph:
    """The program with every named annotation as a signature on the placement of its op.

    Arguments:
      placement: of the program.
      stage: of an op of which nothing says where it belongs; None for that of the program.
      follow: whether JAX's own words of a line are followed; `sbp.annotate` always is.
    """
    if not any(map(pin_of, traced.graph.walk())):
        return ConstrainedGraph(traced)
    walk = _Constraints(traced.graph, placement, stage or placement, follow)
    graph = walk.editor.finish(walk.nodes(traced.graph.nodes))
    ignored = tuple(dict.fromkeys(walk.ignored))
    return ConstrainedGraph(
        replace(traced, graph=graph), tuple(walk.problems), tuple(_notes(walk.silent)), ignored
    )


def _on_wide_axes(nd: NdSbp | None, place: Placement) -> NdSbp | None:
    """A signature that says nothing along axes of one device; one that does not fit is refused later."""
    return nd if nd is None or len(nd) != place.ndim else on_wide_axes(nd, place.shape)


class _Constraints:
    """Walks a graph, bodies included."""

    def __init__(
        self, graph: Graph, whole: Placement, place: Placement, follow: Callable[[Source], bool]
    ) -> None:
        self.graph, self.whole, self.place, self.follow = graph, whole, place, follow
        self.editor = Editor(graph)
        self.problems: list[Problem] = []
        self.silent: list[Node] = []
        self.ignored: list[IgnoredConstraint] = []

    def nodes(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        out: list[Node] = []
        for node in nodes:
            bodies = tuple(replace(b, nodes=self.nodes(b.nodes)) for b in node.bodies)
            kept = self.one(replace(node, bodies=bodies) if bodies else node)
            if kept is None:
                self.editor.substitute(node.outputs, node.inputs)
            else:
                out.append(kept)
        return tuple(out)

    def one(self, node: Node) -> Node | None:
        """An annotation as a signature; None if it says nothing, or is left out."""
        pin = pin_of(node)
        if pin is None:
            return node
        if pin.named_signature is None and pin.named_grad is None:
            place = pin.placement or node.role.place or self.place
            wide = replace(pin, nd=_on_wide_axes(pin.nd, place), grad=_on_wide_axes(pin.grad, place))
            return node if wide == pin else replace(node, params={**node.params, "pin": wide})
        if pin.named_signature is not None and pin.words != OWN and not self.follow(node.source):
            if not pin.named_signature.says_nothing:
                self.ignored.append(IgnoredConstraint(pin.words, node.source, pin.named_signature))
            return None
        levels = self.levels(node, pin, pin.named_signature)
        grad = self.levels(node, pin, pin.named_grad)
        if levels is None and grad is None:
            return None
        plain = replace(
            pin, named_signature=None, named_grad=None, nd=_whole(levels), grad=_whole(grad) or pin.grad
        )
        return replace(node, params={**node.params, "pin": replace(plain, levels=levels or ())})

    def levels(self, node: Node, pin: Pin, named: NamedSignature | None) -> Levels | None:
        """What is said along each axis of the op's placement; None for nothing."""
        if named is None:
            return None
        if named.says_nothing:
            self.silent.append(node)
            return None
        wrong = list(named.wrong(self.whole.axes, self.whole.shape))
        self.problems += [self.problem(node, pin, named, *w) for w in wrong]
        place = node.role.place or self.place
        found = None if wrong else named.along(place.axes)
        if found is None or all(s is None for s in found):
            return None
        return tuple(s if n > 1 else B for s, n in zip(found, place.shape, strict=True))

    def problem(self, node: Node, pin: Pin, named: NamedSignature, why: str, fix: str) -> Problem:
        value = self.graph.operand(node.inputs[0])
        ignore = ", or sbp.Options(constraints='ignore') if you cannot change the code"
        axes = ", ".join(f"{a}={n}" for a, n in zip(self.whole.axes, self.whole.shape, strict=True))
        return Problem(
            "annotation",
            f"{pin.words} at {node.source}: {value.dtype}{list(value.shape)}",
            str(named),
            f"axes of {self.whole.kind}({axes})",
            why,
            fix if pin.words == OWN else fix + ignore,
        )


def _whole(levels: Levels | None) -> NdSbp | None:
    """A signature along all axes; None where some are free."""
    found = tuple(s for s in levels or () if s is not None)
    return found if levels and len(found) == len(levels) else None


def _notes(silent: Iterable[Node]) -> Iterator[str]:
    """One remark for all that says nothing."""
    lines = list(dict.fromkeys(str(n.source) for n in silent))
    if lines:
        more = f" and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
        shown = ", ".join(lines[:MOST_LINES]) + more
        yield f"constraints of a mesh of one device say nothing, and were left out: {shown}"
