"""sbp: a single-device JAX program, plus placements and N-D SBP signatures, becomes a distributed one."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING

if importlib.util.find_spec("sbp.passes") is None or importlib.util.find_spec("sbp.runtime") is None:
    raise ImportError(
        "sbp/passes and sbp/runtime are no links to the folders passes and runtime here: an archive from a "
        "web page, or git without core.symlinks, makes text files of them. Try: pip install . (or -e .) in "
        "the folder that holds pyproject.toml, or git clone -c core.symlinks=true"
    )

# `placement` is also a module's name, so it is bound at once (its import is cheap); all else waits.
from sbp import compat_forks as compat_forks  # it sees forks from now on
from sbp.placement import Placement, placement
from sbp.quiet import expect_no_driver
from sbp.version import VERSION

expect_no_driver()

# name -> the module that defines it, imported on first use
_FACE = {
    "S": "sbp.signature",
    "B": "sbp.signature",
    "P": "sbp.signature",
    "AUTO": "sbp.signature",
    "Split": "sbp.signature",
    "Broadcast": "sbp.signature",
    "Partial": "sbp.signature",
    "Hardware": "sbp.hardware",
    "Link": "sbp.hardware",
    "hardware_from": "sbp.hardware_file",
    "annotate": "sbp.annotation",
    "on": "sbp.annotation",
    "microbatch": "sbp.batching",
    "ExchangeOptions": "sbp.options",
    "Options": "sbp.options",
    "PipelineOptions": "sbp.options",
    "register_rule": "sbp.rules",
    "rows": "sbp.lazy",
    "bind": "sbp.shards",
    "on_shards": "sbp.shards",
    "SbpError": "sbp.errors",
    "compile": "sbp.runtime.execute",
    "constrain": "sbp.runtime.constraints.constrain",
    "initialize": "sbp.runtime.processes.start",
    "to_host": "sbp.runtime.processes.host",
    "fit": "sbp.runtime.training.fit",
    "FitResult": "sbp.runtime.training.fit",
    "NonFinitePolicy": "sbp.runtime.training.policy",
    "save": "sbp.runtime.checkpoint.api",
    "restore": "sbp.runtime.checkpoint.api",
    "Checkpoints": "sbp.runtime.checkpoint.checkpoints",
    "Program": "sbp.runtime.execute",
    "load_executable": "sbp.runtime.saved.load",
    "search": "sbp.runtime.search.search",
    "Ranking": "sbp.runtime.search.ranking",
    "verify": "sbp.runtime.verify",
    "Plan": "sbp.passes.face",
    "PipelinePlan": "sbp.passes.face",
    "Profile": "sbp.runtime.measured.profile",
    "Collective": "sbp.passes.explain.plan",
    "load_plan": "sbp.passes.face",
}

# whole packages under a shorter name
_PACKAGES = {"embedding": "sbp.runtime.embedding"}

__version__ = VERSION

if TYPE_CHECKING:
    from sbp.annotation import annotate, on
    from sbp.batching import microbatch
    from sbp.errors import SbpError
    from sbp.hardware import Hardware, Link
    from sbp.hardware_file import hardware_from
    from sbp.lazy import rows
    from sbp.options import ExchangeOptions, Options, PipelineOptions
    from sbp.passes.explain.plan import Collective
    from sbp.passes.face import PipelinePlan, Plan, load_plan
    from sbp.rules import register_rule
    from sbp.runtime import embedding
    from sbp.runtime.checkpoint.api import restore, save
    from sbp.runtime.checkpoint.checkpoints import Checkpoints
    from sbp.runtime.constraints.constrain import constrain
    from sbp.runtime.execute import Program, compile
    from sbp.runtime.measured.profile import Profile
    from sbp.runtime.processes.host import to_host
    from sbp.runtime.processes.start import initialize
    from sbp.runtime.saved.load import load_executable
    from sbp.runtime.search.ranking import Ranking
    from sbp.runtime.search.search import search
    from sbp.runtime.training.fit import FitResult, fit
    from sbp.runtime.training.policy import NonFinitePolicy
    from sbp.runtime.verify import verify
    from sbp.shards import bind, on_shards
    from sbp.signature import AUTO, B, Broadcast, P, Partial, S, Split
else:  # a checker that sees it takes any name for one of this module

    def __getattr__(name):
        if name in _PACKAGES:
            return importlib.import_module(_PACKAGES[name])
        if name not in _FACE:
            raise AttributeError(f"module 'sbp' has no attribute {name!r}")
        return getattr(importlib.import_module(_FACE[name]), name)


__all__ = [
    "AUTO",
    "B",
    "Broadcast",
    "Checkpoints",
    "Collective",
    "ExchangeOptions",
    "FitResult",
    "Hardware",
    "Link",
    "NonFinitePolicy",
    "Options",
    "P",
    "Partial",
    "PipelineOptions",
    "PipelinePlan",
    "Placement",
    "Plan",
    "Profile",
    "Program",
    "Ranking",
    "S",
    "SbpError",
    "Split",
    "annotate",
    "bind",
    "compile",
    "constrain",
    "embedding",
    "fit",
    "hardware_from",
    "initialize",
    "load_executable",
    "load_plan",
    "microbatch",
    "on",
    "on_shards",
    "placement",
    "register_rule",
    "restore",
    "rows",
    "save",
    "search",
    "to_host",
    "verify",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *_FACE, *_PACKAGES})
