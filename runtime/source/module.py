"""A plan as a Python module: what `plan.source()` gives."""

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from sbp.notation.resolve import to_partition_spec
from sbp.passes.boxing.links import Network
from sbp.passes.explain.internal_errors import public
from sbp.passes.explain.plan import PlanData
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Physical
from sbp.passes.render.program_source import ProgramSource
from sbp.placement import Placement
from sbp.runtime.source import specs
from sbp.runtime.source.device import DeviceProgram, DeviceWriter
from sbp.runtime.source.line_wrapping import WIDTH, statement
from sbp.runtime.source.names import identifier
from sbp.runtime.source.text import GivenThings
from sbp.runtime.source.tracing import boundary, trace_device
from sbp.text.units import bytes_text, seconds_text


@public
def write_source(plan: PlanData) -> ProgramSource:
    """The source of a plan.

    Raises:
      ArgumentError: for a plan without its program, and for one of a pipeline.
    """
    physical = plan.physical
    assert physical is not None
    takes = Evaluator(physical, Network(plan.placement, plan.hardware), plan.donated)
    return SourceModule(plan, physical, takes).source()


@dataclass
class SourceModule:
    """Writes the module of one plan."""

    plan: PlanData
    physical: Physical
    takes: Evaluator
    objects: GivenThings = field(default_factory=GivenThings)

    def source(self) -> ProgramSource:
        """The module, and what it must be given."""
        traced, name = trace_device(self.physical, self.takes), identifier(self.plan.name)
        program = DeviceProgram(traced, self.physical, (self.plan.in_paths, self.plan.out_paths))
        inputs = program.block[0].inputs
        # A program is not given what has no elements.
        empty = bool(inputs) and all(0 in v.shape for v in inputs)
        rows = {c.name: c for c in self.plan.collectives if c.name}
        writer = DeviceWriter(self.objects, {name, f"{name}_on_device"})
        doc = "What one device does: its shards of the arguments in, its shards of the results out."
        parts = writer.functions(program, f"{name}_on_device", rows, doc, empty=empty)
        body = "\n".join([*self._specs(program.arguments), *parts, "", "", *self._entry(name, empty)])
        text = head(self._claim(), body) + body + "\n"
        return ProgramSource(name, text, dict(self.objects.things), self.physical.graph.consts)

    def _specs(self, arguments: Sequence[str]) -> list[str]:
        """The mesh, and how arguments arrive and results leave."""
        placement = self.physical.placement
        ins, outs = boundary(self.physical)
        count = len(self.physical.graph.inputs)
        graph = self.physical.graph
        in_paths = [*self.plan.in_paths, *arguments[len(self.plan.in_paths) :]][:count]
        dtypes = (
            [graph.values[v].dtype for v in graph.inputs],
            [graph.operand(x).dtype for x in graph.outputs],
        )
        tables = []
        for title, pairs, paths, kinds in (
            ("IN_SPECS", ins, in_paths, dtypes[0]),
            ("OUT_SPECS", outs, self.plan.out_paths, dtypes[1]),
        ):
            leaves = []
            for (shape, nd), path, dtype in zip(pairs, paths, kinds, strict=True):
                spec = specs.mesh_axes(to_partition_spec(nd, len(shape), placement))
                leaves.append(specs.SpecLine(path, spec, f"{dtype}[{', '.join(map(str, shape))}]"))
            tables.append((title, leaves))
        return [
            *statement("MESH = ", mesh(placement), 0),
            "",
            *specs.lines(tables, ("MESH", "IN_SPECS", "OUT_SPECS", "B", "P", "S")),
        ]

    def _entry(self, name: str, empty: bool) -> list[str]:
        """The function of whole arrays."""
        donated = self.plan.donated
        jit = "@jax.jit" if not donated else f"@functools.partial(jax.jit, donate_argnums={tuple(donated)})"
        taken = "()" if empty else "IN_SPECS"
        leaves = "" if empty else "*leaves"
        call = f"{name}_on_device", "mesh=MESH", f"in_specs={taken}", "out_specs=OUT_SPECS", "check_vma=False"
        return [
            *statement("", jit, 0),
            f"def {name}(*leaves):",
            '    """Whole arrays in the order of IN_SPECS in, whole arrays in the order of OUT_SPECS out."""',
            *statement("on_devices = ", f"jax.shard_map({', '.join(call)})", 4),
            f"    return on_devices({leaves})",
        ]

    def _claim(self) -> str:
        """The plan in a sentence."""
        plan = self.plan
        rows = sum(c.count for c in plan.collectives)
        what = f"{rows} collective{'' if rows == 1 else 's'} per step" if rows else "nothing is sent"
        return (
            f"{plan.name} on {plan.placement}, as sbp has planned it: {what}"
            + (f", {bytes_text(plan.wire_bytes)} sent per device" if rows else "")
            + f"; {seconds_text(plan.step_seconds)} per step, estimated."
        )


def head(claim: str, body: str) -> str:
    """A module's docstring and imports: those that its body uses.

    Arguments:
      claim: the first sentence.
    """
    more = (
        "Arrays inside are the shards of one device: beside each stands its type, and the signature of "
        "the whole tensor. A row is one of the plan: what is sent, and why."
    )
    doc = ['"""' + "\n".join(textwrap.wrap(claim, WIDTH - 3)), "", *textwrap.wrap(more, WIDTH), '"""', ""]
    imports = [line for line, uses in _IMPORTS if re.search(uses, body, re.DOTALL)]
    own = ", ".join(s for s in ("B", "P", "S") if re.search(rf"[\[ ]{s}\b[\](,]", body.replace("# ", "#")))
    shards = "sbp.shards." in body
    imports += ["", "import sbp"] if "sbp." in re.sub(r"#.*", "", body) else []
    imports += [f"from sbp import {own}"] if own and shards else []
    bits = ", ".join(f for f in ("extremum", "owned_sum", "all_product") if f"{f}(" in body)
    imports += [f"from sbp.communication.bits import {bits}"] if bits else []
    said = []
    if 'given["' in body:
        said = [
            "",
            "# What no text can say, by name: `Source.load` hands it over.",
            'given = globals().get("given", {})',
        ]
    return "\n".join([*doc, *imports, *said, "", ""])


_IMPORTS = (
    ("import functools", r"functools\."),
    ("from collections import Counter, deque", r"\bdeque\("),
    ("from collections import Counter", r"^(?!.*\bdeque\().*\bCounter\("),
    ("from typing import Any, NamedTuple", r"NamedTuple"),
    ("", r"functools\.|NamedTuple"),
    ("import jax", r"jax\."),
    ("import jax.numpy as jnp", r"\bjnp\."),
    ("import numpy as np", r"\bnp\."),
    ("from jax import lax", r"\blax\."),
    ("from jax.sharding import Mesh, NamedSharding, PartitionSpec", r"NamedSharding"),
    ("from jax.sharding import Mesh, PartitionSpec", r"^(?!.*NamedSharding).*PartitionSpec"),
)


def mesh(placement: Placement) -> str:
    """The mesh of a placement, as code."""
    ranks, shape = tuple(placement.ranks), tuple(placement.shape)
    devices = f'jax.devices("{placement.platform}")'
    first = ranks[0] if ranks else 0
    if ranks == tuple(range(first, first + len(ranks))):
        chosen = f"{devices}[{first or ''}:{first + len(ranks)}]"
    else:
        chosen = f"[{devices}[rank] for rank in {list(ranks)}]"
    axes = "(" + ", ".join(f'"{a}"' for a in placement.axes) + ("," if len(placement.axes) == 1 else "") + ")"
    return f"Mesh(np.array({chosen}).reshape({', '.join(map(str, shape))}), {axes})"
