"""Values, equations and blocks: what the printer makes of a jaxpr."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sbp.compat import core
from sbp.compat.untyped import DType

SPEAKING = ("callback", "debug_print")
"""What names of primitives end with that tell the host something: they run though nobody uses a result."""


@dataclass(frozen=True, slots=True)
class Var:
    """A value of one device."""

    id: int
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Lit:
    """A scalar that stands in an equation itself."""

    value: Any
    dtype: DType
    shape: tuple[int, ...] = ()


Term: TypeAlias = Var | Lit


@dataclass(frozen=True, slots=True)
class Block:
    """A sequence of steps: the program, the body of a loop, or a branch, which may read values of the
    blocks around it.
    """

    inputs: tuple[Var, ...]
    eqns: tuple[Eqn, ...]
    outputs: tuple[Term, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Eqn:
    """One primitive.

    Arguments:
      step: the position of its step of the plan; -1 for none.
      blocks: of a loop or a branch.
      operand_count: of a scan, how many operands; the rest is scanned.
      scope: the names around it, where they are kept: of stages, micro-batches and derivatives.
    """

    primitive: core.Bindable
    params: Mapping[str, Any]
    ins: tuple[Term, ...]
    outs: tuple[Var, ...]
    step: int
    blocks: tuple[Block, ...] = ()
    operand_count: int = 0
    scope: str = ""

    @property
    def name(self) -> str:
        """Of the primitive."""
        return str(self.primitive.name)

    @property
    def speaks(self) -> bool:
        """Whether it runs though nobody uses what it makes."""
        return self.name.endswith(SPEAKING) or any(e.speaks for b in self.blocks for e in b.eqns)
