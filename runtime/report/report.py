"""`ProgramReport`: plan against compiled program, with every way to show it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields

from sbp.passes.face import Plan
from sbp.rates.chips import Chip
from sbp.runtime.report import files, page, text
from sbp.runtime.target.comparison import ComparedProgram, HasMemory, compared


@dataclass(frozen=True, repr=False)
class ProgramReport(ComparedProgram):
    """Plan against compiled program; `print` shows it, `save` writes it. Made by `Program.report`."""

    def __str__(self) -> str:
        return text.report_text(self)

    def __repr__(self) -> str:
        return text.report_line(self)

    def _repr_html_(self) -> str:
        return page.report_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report; the suffix chooses the form: .json, .html, .txt, or .trace.json for Perfetto.

        Raises:
          ArgumentError: for another suffix, or for a trace where nothing could be simulated.
        """
        files.save_report(self, path)


def report_of(
    plan: Plan,
    compiled: HasMemory,
    chip: Chip | None,
    lowered_text: Callable[[], str],
    domain_devices: int | None = None,
) -> ProgramReport:
    """The report of a compiled program; arguments as of `compared`.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.
    """
    found = compared(plan, compiled, chip, lowered_text, domain_devices)
    return ProgramReport(**{f.name: getattr(found, f.name) for f in fields(found)})
