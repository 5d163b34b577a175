"""`Options` from names of options alone, whatever group they are in."""

from dataclasses import fields
from typing import Any

import sbp
from sbp.options import ExchangeOptions, PipelineOptions


def options_of(**given: Any) -> sbp.Options:
    """Options of these names, each in its group."""
    groups: dict[str, Any] = {"exchange": ExchangeOptions, "pipeline": PipelineOptions}
    for group, of in groups.items():
        names = [f.name for f in fields(of) if f.name in given]
        if names:
            given[group] = of(**{name: given.pop(name) for name in names})
    return sbp.Options(**given)
