"""Attributes kernels to the user's lines, where instructions do not carry the numbers of steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sbp.passes.explain.measurement import kernel_estimate
from sbp.runtime.hlo.origins import Origin
from sbp.runtime.hlo.parser import Instruction
from sbp.runtime.profile.trace_alignment import ProgramReader


@dataclass(frozen=True)
class LineReader:
    """The lines of the kernels of a compiled program.

    Arguments:
      reader: of its text.
      origins: where each instruction comes from.
      steps: of the plan's program, as JSON has them, in the order of their numbers.
      phases: those of this program; a line that also has ops of other phases counts for these.
    """

    reader: ProgramReader
    origins: Mapping[str, Origin]
    steps: Sequence[Mapping[str, Any]]
    phases: Collection[str]

    def shares(self, name: str) -> Mapping[int, float]:
        """The steps of an instruction, weighted by their estimated time; none if it has no line."""
        return self._shares.get(name, {})

    @cached_property
    def _at(self) -> Mapping[str, Sequence[int]]:
        """Per line, the steps that compute something there."""
        found: dict[str, list[int]] = {}
        for k, step in enumerate(self.steps):
            if "at" in step and kernel_estimate(step) > 0:
                found.setdefault(step["at"], []).append(k)
        return {
            at: [k for k in own if self.steps[k]["phase"] in self.phases] or own for at, own in found.items()
        }

    @cached_property
    def _shares(self) -> Mapping[str, Mapping[int, float]]:
        return {x.name: self._shared(x) for _, x in self.reader.module.instructions}

    def _shared(self, x: Instruction) -> Mapping[int, float]:
        own = {k for line in set(self._lines(x)) for k in self._at.get(line, ())}
        seconds = {k: kernel_estimate(self.steps[k]) for k in sorted(own)}
        total = math.fsum(seconds.values())
        return {k: s / total for k, s in seconds.items()} if total else {}

    def _lines(self, x: Instruction) -> Iterator[str]:
        """The line of an instruction, and the lines of the ops that it has fused."""
        inside = [
            inner
            for called in x.inner
            for inner in self.reader.module.computations[called].instructions.values()
        ]
        for one in (x, *inside):
            origin = self.origins.get(one.name)
            if origin is not None and origin.source:
                yield origin.source
