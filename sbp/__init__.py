"""sbp: a single-device JAX program, plus placements and N-D SBP signatures, becomes a distributed one."""

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
from sbp.compat.forks import watch_forks
from sbp.compat.plugin_logs import expect_no_driver
from sbp.placement import Placement, placement
from sbp.version import VERSION

expect_no_driver()
watch_forks()

# name -> the module that defines it, imported on first use
_FACE = {
    "S": "sbp.signature",
    "B": "sbp.signature",
    "P": "sbp.signature",
    "AUTO": "sbp.signature",
    "annotate": "sbp.annotation",
    "on": "sbp.annotation",
    "microbatch": "sbp.batching",
    "Options": "sbp.options",
    "register_rule": "sbp.rules",
    "rows": "sbp.lazy",
    "InternalError": "sbp.errors",
    "SbpError": "sbp.errors",
    "compile": "sbp.runtime.program.compile",
    "constrain": "sbp.runtime.constraints.constrain",
    "initialize": "sbp.runtime.processes.initialize",
    "to_host": "sbp.runtime.arrays.host_copies",
    "fit": "sbp.runtime.training.fit",
    "save": "sbp.runtime.checkpoint.api",
    "restore": "sbp.runtime.checkpoint.api",
    "Checkpoints": "sbp.runtime.checkpoint.checkpoints",
    "Program": "sbp.runtime.program.program",
    "load_executable": "sbp.runtime.program.load",
    "search": "sbp.runtime.search.search",
    "verify": "sbp.runtime.diagnose.verify",
    "Plan": "sbp.passes.face",
    "Collective": "sbp.passes.explain.plan",
    "load_plan": "sbp.passes.face",
}

# modules that come with `import sbp`, some of them under a shorter name
_MODULES = {
    "embedding": "sbp.runtime.embedding",
    "errors": "sbp.errors",
    "hardware": "sbp.hardware",
    "options": "sbp.options",
    "shards": "sbp.rules.shards",
    "signature": "sbp.signature",
    "training": "sbp.runtime.training",
    "view": "sbp.view",
}

# what once was a name of this module, and where it is now
_MOVED = {
    "Broadcast": "sbp.signature.Broadcast",
    "ExchangeOptions": "sbp.options.ExchangeOptions",
    "FitResult": "sbp.training.FitResult",
    "Hardware": "sbp.hardware.Hardware",
    "Link": "sbp.hardware.Link",
    "NonFinitePolicy": "sbp.training.NonFinitePolicy",
    "Partial": "sbp.signature.Partial",
    "PipelineOptions": "sbp.options.PipelineOptions",
    "PipelinePlan": "sbp.passes.face.Plan",
    "Profile": "sbp.runtime.profile.profile.Profile",
    "Ranking": "sbp.runtime.search.ranking.Ranking",
    "Split": "sbp.signature.Split",
    "bind": "sbp.shards.bind",
    "hardware_file": "sbp.hardware.hardware_from",
    "hardware_from": "sbp.hardware.hardware_from",
    "on_shards": "sbp.shards.on_shards",
}

__version__ = VERSION

if TYPE_CHECKING:
    from sbp import errors as errors
    from sbp import hardware as hardware
    from sbp import options as options
    from sbp import signature as signature
    from sbp import view as view
    from sbp.annotation import annotate, on
    from sbp.batching import microbatch
    from sbp.errors import InternalError, SbpError
    from sbp.lazy import rows
    from sbp.options import Options
    from sbp.passes.explain.plan import Collective
    from sbp.passes.face import Plan, load_plan
    from sbp.rules import register_rule
    from sbp.rules import shards as shards
    from sbp.runtime import embedding
    from sbp.runtime import training as training
    from sbp.runtime.arrays.host_copies import to_host
    from sbp.runtime.checkpoint.api import restore, save
    from sbp.runtime.checkpoint.checkpoints import Checkpoints
    from sbp.runtime.constraints.constrain import constrain
    from sbp.runtime.diagnose.verify import verify
    from sbp.runtime.processes.initialize import initialize
    from sbp.runtime.program.compile import compile
    from sbp.runtime.program.load import load_executable
    from sbp.runtime.program.program import Program
    from sbp.runtime.search.search import search
    from sbp.runtime.training.fit import fit
    from sbp.signature import AUTO, B, P, S
else:  # a checker that sees it takes any name for one of this module

    def __getattr__(name):
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _FACE:
            moved = f"; it is {_MOVED[name]}" if name in _MOVED else ""
            raise AttributeError(f"module 'sbp' has no attribute {name!r}{moved}")
        return getattr(importlib.import_module(_FACE[name]), name)


__all__ = [
    "AUTO",
    "B",
    "Checkpoints",
    "Collective",
    "InternalError",
    "Options",
    "P",
    "Placement",
    "Plan",
    "Program",
    "S",
    "SbpError",
    "annotate",
    "compile",
    "constrain",
    "embedding",
    "fit",
    "initialize",
    "load_executable",
    "load_plan",
    "microbatch",
    "on",
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
    return sorted({*globals(), *_FACE, *_MODULES})
