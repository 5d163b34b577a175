"""What a placement's program is cut into: pieces, and the slots that tensors between them lie in.

Words: docs/glossary.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sbp.passes.physical.program import Physical, Step, Version
from sbp.passes.pipeline.split import Subgraph
from sbp.passes.program.graph import Const, Graph, Operand
from sbp.passes.program.role import Part
from sbp.signature import NdSbp


class SlotKind(StrEnum):
    """How long what is in a slot lives: for the step, for a micro-batch, or from one of them to the next."""

    ONCE = "once"
    EACH = "each"
    CARRY = "carry"


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a tensor between pieces.

    Arguments:
      value: whose; that of a number is negative.
      nd: how it lies in there.
      slice: whether the value is the stack of all micro-batches', and this is one of them.
    """

    kind: SlotKind
    value: int
    nd: NdSbp
    slice: bool = False

    def shape(self, graph: Graph) -> tuple[int, ...]:
        """The logical shape of what it holds."""
        if self.value < 0:
            return ()
        return graph.values[self.value].shape[1 if self.slice else 0 :]

    def __hash__(self) -> int:
        # Slots are keys in the driver's loop; that of all fields is several times slower.
        return self.value


class How(StrEnum):
    """How a piece takes what is in a slot: as it is, its micro-batch's slice, or those of all, stacked."""

    WHOLE = "whole"
    SLICE = "slice"
    STACK = "stack"


@dataclass(frozen=True, slots=True)
class Read:
    """A piece reads a slot, and calls the tensor `version`."""

    slot: Slot
    version: Version
    how: How = How.WHOLE


@dataclass(frozen=True, slots=True)
class Write:
    """A piece puts a version of a value, or a number, into a slot."""

    operand: Operand
    nd: NdSbp
    slot: Slot


@dataclass(frozen=True)
class Piece:
    """What one placement runs in one go.

    Arguments:
      numbers: what enters the loop as a number: the version that its body reads, and the number.
    """

    part: Part
    steps: tuple[Step, ...]
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    numbers: tuple[tuple[Version, Const], ...] = ()


@dataclass(frozen=True)
class Cut:
    """The pieces of one placement.

    Arguments:
      pieces: those before the loop, of the body, and after it, in an order in which they can run.
      arguments, closure, results, receives, sends: the slots of its subgraph's; a result may be a number.
      micro_receives, micro_sends: likewise, of what is sent for every micro-batch.
    """

    subgraph: Subgraph
    physical: Physical
    pieces: tuple[Piece, ...]
    arguments: tuple[Slot, ...]
    closure: tuple[Slot, ...]
    results: tuple[Slot, ...]
    receives: Mapping[int, Slot]
    sends: Mapping[int, Slot]
    micro_receives: Mapping[int, Slot]
    micro_sends: Mapping[int, Slot]

    @property
    def given_slots(self) -> tuple[Slot, ...]:
        """The slots of what comes with a call, or is closed over."""
        return (*self.arguments, *self.closure)
