"""A plan as a Python module: what `plan.source()` gives."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp import compat
from sbp.passes.boxing.links import Network
from sbp.passes.explain.plan import PlanData
from sbp.passes.look.source import ProgramSource
from sbp.passes.physical.evaluate import Evaluator
from sbp.passes.physical.program import Physical
from sbp.placement import Placement
from sbp.resolve import to_partition_spec
from sbp.runtime.source import specs
from sbp.runtime.source.fold import Fold, without_copies
from sbp.runtime.source.ir import BlockBuilder
from sbp.runtime.source.lines import CodeLine, Function, Writer, ids_in
from sbp.runtime.source.names import Hints, identifier
from sbp.runtime.source.text import GivenThings, Text, dtype_text, literal
from sbp.runtime.source.tracing import boundary, trace_device
from sbp.runtime.source.values import Block, Eqn, Var
from sbp.runtime.source.wrapped import WIDTH, statement
from sbp.runtime.source.written import Printer, Wishes
from sbp.units import bytes_text, seconds_text


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
    given: GivenThings = field(default_factory=GivenThings)

    def source(self) -> ProgramSource:
        """The module, and what it must be given."""
        traced = trace_device(self.physical, self.takes)
        build = BlockBuilder()
        entering = [None if x is None else build.constant(x) for x in traced.entering]
        block = build.block(traced.jaxpr, entering, traced.consts)
        hints = Hints(self.physical, (self.plan.in_paths, self.plan.out_paths), traced.steps, build.steps)
        numbers = itertools.count(next(build.fresh))

        def keeps(eqn: Eqn, user: Eqn) -> bool:
            name, is_users = hints.of(eqn, True)
            return is_users and name != hints.of(user, True)[0]

        def place(eqn: Eqn) -> tuple[Any, ...]:
            source = hints.source(eqn.step)
            return source.file, source.line, hints.phase(eqn.step)

        def late(line: CodeLine) -> bool:
            return hints.phase(line.step) == "update"

        writer = Writer(self.given, keeps, place, lambda v: v.id in build.steps, numbers)
        writer.texts.update({v: self._constant(v, x) for v, x in build.constants.items()})
        lines, results = writer.block(block)
        names = Wishes(hints)
        names.wanted.update(zip((v.id for v in block.inputs), hints.arguments, strict=True))
        names.learn([*lines, *writer.picks.values()])
        fold = Fold(
            numbers,
            lambda line: line.eqn and place(line.eqn),
            late,
            lambda some: _title(hints, some),
            writer.picks,
        )
        result = f"({results[0]},)" if len(results) == 1 else ", ".join(results)
        main = fold.lines(lines, ids_in(result))
        main, result = without_copies(main, result)
        text = self._text(block, main, result or "()", fold.functions, names, hints)
        consts = self.physical.graph.consts
        return ProgramSource(identifier(self.plan.name), text, dict(self.given.things), consts)

    def _constant(self, v: Var, value: Any) -> Text:
        if v.shape and not compat.is_key(v.dtype) and value.size <= _SHORT:
            return Text(literal(value, "constant", self.given).replace("np.array", "jnp.array"))
        return Text(f"jnp.asarray({self.given.name(value, 'constant')})")

    def _text(
        self,
        block: Block,
        main: Sequence[CodeLine],
        result: str,
        functions: Sequence[Function],
        names: Wishes,
        hints: Hints,
    ) -> str:
        name = identifier(self.plan.name)
        called = _unique([f.wanted for f in functions], {name, f"{name}_on_device", *_KNOWN})
        by_id = dict(zip((f.id for f in functions), called, strict=True))
        printer = Printer(names, {c.name: c for c in self.plan.collectives if c.name}, by_id)
        parts: list[str] = []
        for f, title in zip(functions, called, strict=True):
            doc = [f'"""Called {f.calls} times, with the tensors of each."""']
            wanted = dict(names.wanted)
            names.forget_layers(f)
            parts += ["", "", *printer.function(title, f.params, f.lines, f.results, doc)]
            names.wanted = wanted
        params = [(v,) for v in block.inputs]
        empty = bool(block.inputs) and not any(_elements(v.shape) for v in block.inputs)
        lines = [*(self._made(v) for v in block.inputs), *main] if empty else main
        doc = ['"""What one device does: its shards of the arguments in, its shards of the results out."""']
        parts += [
            "",
            "",
            *printer.function(f"{name}_on_device", [] if empty else params, lines, result, doc),
        ]
        body = "\n".join([*self._specs(hints), *parts, "", "", *self._entry(name, empty)])
        return self._head(body) + body + "\n"

    def _made(self, v: Var) -> CodeLine:
        """A shard without elements, which no program is given."""
        return CodeLine((v,), f"jnp.zeros({v.shape}, {dtype_text(v.dtype)})", None)

    def _specs(self, hints: Hints) -> list[str]:
        """The mesh, and how arguments arrive and results leave."""
        placement = self.physical.placement
        ins, outs = boundary(self.physical)
        count = len(self.physical.graph.inputs)
        graph = self.physical.graph
        in_paths = [*self.plan.in_paths, *hints.arguments[len(self.plan.in_paths) :]][:count]
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
        return [*_mesh(placement), "", *specs.lines(tables, ("MESH", "IN_SPECS", "OUT_SPECS", "B", "P", "S"))]

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

    def _head(self, body: str) -> str:
        """The module's docstring and imports: those that its body uses."""
        plan = self.plan
        rows = sum(c.count for c in plan.collectives)
        what = f"{rows} collective{'' if rows == 1 else 's'} per step" if rows else "nothing is sent"
        text = (
            f"{plan.name} on {plan.placement}, as sbp has planned it: {what}"
            + (f", {bytes_text(plan.wire_bytes)} sent per device" if rows else "")
            + f"; {seconds_text(plan.step_seconds)} per step, estimated."
        )
        more = (
            "Arrays inside are the shards of one device: beside each stands its type, and the signature of "
            "the whole tensor. A row is one of the plan: what is sent, and why."
        )
        doc = ['"""' + "\n".join(textwrap.wrap(text, WIDTH - 3)), "", *textwrap.wrap(more, WIDTH), '"""', ""]
        imports = [line for line, uses in _IMPORTS if re.search(uses, body)]
        own = ", ".join(
            s for s in ("B", "P", "S") if re.search(rf"[\[ ]{s}\b[\](,]", body.replace("# ", "#"))
        )
        shards = "sbp.on_shards(" in body
        imports += ["", "import sbp"] if "sbp." in re.sub(r"#.*", "", body) else []
        imports += [f"from sbp import {own}"] if own and shards else []
        bits = ", ".join(f for f in ("extremum", "owned_sum") if f"{f}(" in body)
        imports += [f"from sbp.talk.bits import {bits}"] if bits else []
        said = []
        if 'given["' in body:
            said = ["", "# What no text can say, by name: `Source.load` hands it over."]
            said += ['given = globals().get("given", {})']
        return "\n".join([*doc, *imports, *said, "", ""])


_SHORT = 32
_KNOWN = ("jax", "jnp", "lax", "np", "sbp", "given", "extremum", "owned_sum", "functools")
_IMPORTS = (
    ("import functools\n", r"functools\."),
    ("import jax", r"jax\."),
    ("import jax.numpy as jnp", r"\bjnp\."),
    ("import numpy as np", r"\bnp\."),
    ("from jax import lax", r"\blax\."),
    ("from jax.sharding import Mesh, PartitionSpec", r"PartitionSpec"),
)


def _mesh(placement: Placement) -> list[str]:
    ranks, shape = tuple(placement.ranks), tuple(placement.shape)
    devices = f'jax.devices("{placement.platform}")'
    if ranks == tuple(range(len(ranks))):
        chosen = f"{devices}[:{len(ranks)}]"
    else:
        chosen = f"[{devices}[rank] for rank in {list(ranks)}]"
    axes = "(" + ", ".join(f'"{a}"' for a in placement.axes) + ("," if len(placement.axes) == 1 else "") + ")"
    return statement("MESH = ", f"Mesh(np.array({chosen}).reshape{_shape(shape)}, {axes})", 0)


def _shape(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))})"


def _elements(shape: tuple[int, ...]) -> bool:
    return 0 not in shape


def _unique(wanted: Sequence[str], taken: set[str]) -> list[str]:
    out = []
    for name in wanted:
        free = (name if k == 0 else f"{name}_{k + 1}" for k in itertools.count())
        found = next(n for n in free if n not in taken)
        taken.add(found)
        out.append(found)
    return out


def _title(hints: Hints, lines: Sequence[CodeLine]) -> str:
    """What a function of some lines is called: by the pass over the model that they are of."""
    phases = {hints.phase(line.step) for line in lines} - {""}
    if phases == {"update"}:
        return "update"
    return "layer_backward" if "backward" in phases else "layer"
