"""What is not kept from the early uses of a value to later ones: boxed anew, or made anew."""

from dataclasses import dataclass

from sbp.passes.plan.candidates import Strategy
from sbp.passes.program.graph import Graph
from sbp.signature import NdSbp


@dataclass(frozen=True, slots=True)
class Cluster:
    """Uses of a value that are near each other: what they are boxed to is not kept for later ones.

    Arguments:
      users: nodes, or positions of outputs (-1 - i).
      share: what the value is boxed to for them before each takes it from there; None for one user.
    """

    users: frozenset[int]
    share: NdSbp | None


@dataclass(frozen=True, slots=True)
class RecomputedValue:
    """A value that is not kept for its later uses: the op that makes it runs again before the first of them.

    Arguments:
      strategy: of the op, when it runs again.
      users: the later uses, by nodes or positions of outputs (-1 - i).
      share, clusters: as of `ChosenSignatures`, of what is made the second time.
    """

    strategy: Strategy
    users: frozenset[int]
    share: NdSbp | None = None
    clusters: tuple[Cluster, ...] = ()


def op_count(graph: Graph) -> int:
    """One more than the largest id of an op: node `i` is this plus `i` where it runs again."""
    return 1 + max((node.id for node in graph.walk()), default=-1)
