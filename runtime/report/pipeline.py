"""`PipelineReport`: plan against compiled pieces, with every way to show it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sbp.runtime.report import pipeline_text
from sbp.runtime.report.pipeline_comparison import ComparedPipeline
from sbp.runtime.report.report import ProgramReport


@dataclass(frozen=True, repr=False)
class PipelineReport(ComparedPipeline, ProgramReport):
    """Plan against compiled pieces; `print` shows it, `save` writes it. Made by `Program.report`."""

    def __str__(self) -> str:
        return pipeline_text.report_text(self)

    def __repr__(self) -> str:
        return pipeline_text.report_line(self)

    def _repr_html_(self) -> str:
        return pipeline_text.report_html(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report; the suffix chooses the form: .json, .html, .txt, or .trace.json for Perfetto.

        Raises:
          ArgumentError: for another suffix, or for a trace where nothing could be simulated.
        """
        pipeline_text.save_report(self, path)
