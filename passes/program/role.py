"""What the name scope of an op says of it: read once, when the op is made, and a field of it from then on.

Words: docs/glossary.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from sbp.annotation import MICROBATCH, placement_in
from sbp.annotation import SCOPE as ON
from sbp.placement import Placement

SUMS = ("add_any",)
"""Ops whose scope says nothing of their place: JAX adds cotangents wherever it comes by."""
_TRANSFORMS = re.compile(r"\b(jvp|transpose)\(")


class Phase(StrEnum):
    """When a part of a stage runs: once before the loop, per micro-batch, or once after it."""

    BEFORE = "before"
    FORWARD = "F"
    INPUT = "I"  # gradients that other stages wait for
    WEIGHT = "W"  # the rest of the backward pass
    AFTER = "after"


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Some ops of one placement that run together.

    Arguments:
      at: the number of the stage; outside of the loop, how many hops between placements come first.
    """

    phase: Phase
    at: int


@dataclass(frozen=True, slots=True)
class Role:
    """What an op is for.

    Arguments:
      place: the placement that it belongs to; None if nothing says so.
      direction: "backward" of what undoes other ops, "forward" of what is differentiated, "" of all else.
      undoes: whether it belongs to the backward pass of the whole program. An op of a gradient that the model
        itself takes in its forward pass does not.
      microbatches: whether it is the loop over micro-batches.
      part: of the stage that it belongs to, once stages are known.
    """

    place: Placement | None = None
    direction: str = ""
    undoes: bool = False
    microbatches: bool = False
    part: Part | None = None

    @property
    def of_copy(self) -> Role:
        """That of what is computed for the op alone, which is no loop."""
        return replace(self, microbatches=False)

    @property
    def without_direction(self) -> Role:
        """The same of the forward and of the backward pass, between which XLA knows no difference."""
        is_plain = not self.direction and not self.undoes
        return self if is_plain else Role(self.place, "", False, self.microbatches, self.part)

    def on(self, place: Placement) -> Role:
        """The same on a placement."""
        return replace(self, place=place)

    def of(self, part: Part) -> Role:
        """The same as one of a part."""
        return replace(self, part=part)


PLAIN = Role()


def role_of(op: str, scope: str) -> Role:
    """The role of an op, by its name and the name scope that JAX hands through its transformations.

    What stands first in the scope, before that of a placement, is the transformation of the program as a
    whole: "transpose(" there means its backward pass.

    >>> role = role_of("mul", "transpose(jvp(sbp.on:cpu[4,5]2[data]))/layer")
    >>> str(role.place), role.direction, role.undoes
    ('cpu(data=2, ranks [4, 5])', 'backward', True)
    """
    if not scope:  # most ops of a model without scopes: no regular expression for them
        return PLAIN
    derived = "backward" if "transpose(" in scope else "forward" if "jvp(" in scope else ""
    return Role(
        place=None if op in SUMS else placement_in(scope),
        direction=derived,
        undoes=_TRANSFORMS.findall(scope.split(ON, 1)[0])[:1] == ["transpose"],
        microbatches=op == "scan" and MICROBATCH in scope,
    )
