"""The program that somebody has given, as Python of its own: what shows a fault again, without their data."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sbp.annotation import SCOPE as ON
from sbp.compat import core
from sbp.options import Options
from sbp.passes.physical.program import Compute, Physical
from sbp.passes.plan.candidates import Strategy
from sbp.passes.program.graph import Graph
from sbp.passes.program.trace import TracedProgram
from sbp.placement import Placement
from sbp.runtime.lower.reference_interpreter import value_of
from sbp.runtime.source.device import DeviceProgram, DeviceWriter
from sbp.runtime.source.names import identifier
from sbp.runtime.source.text import GivenThings, dtype_text, signature
from sbp.runtime.source.tracing import TracedDevice
from sbp.signature import NdSbp


@dataclasses.dataclass(frozen=True)
class Reproduction:
    """A call of `sbp.compile`, and what of the program fails.

    Arguments:
      name: of the function.
      traced: the function.
      placement, options, donated: as they were given.
      in_sbp, out_sbp: a signature per leaf; None for what is free.
    """

    name: str
    traced: TracedProgram
    placement: Placement
    in_sbp: Sequence[NdSbp | None]
    out_sbp: Sequence[NdSbp | None]
    options: Options
    donated: Sequence[int] = ()

    def text(self, failed: str, said: str) -> str:
        """The program as a file that runs alone.

        Arguments:
          failed: the entry that fails: "plan" or "lower".
          said: what the error said.
        """
        given, graph = GivenThings(), self.traced.graph
        name = identifier(self.name)
        physical = Physical(graph, self.placement, (), (), ())
        # Where there are stages, they and what is backward stand in the names of scopes.
        scoped = any(ON in n.source.scope for n in graph.walk())
        paths = self.traced.in_paths, self.traced.out_paths
        program = DeviceProgram(trace(graph), physical, paths, annotated=True, scoped=scoped)
        writer = DeviceWriter(given, {name})
        function = "\n".join(writer.functions(program, name, {}, "The program, for one device."))
        shapes = [graph.values[v] for v in graph.inputs]
        arguments = [f"jax.ShapeDtypeStruct({v.shape}, {dtype_text(v.dtype)})," for v in shapes]
        ins = [*self.in_sbp, *[None] * (len(shapes) - len(self.in_sbp))]
        lines = [
            *(f"# {line}".rstrip() for line in said.splitlines()),
            f"# jax {jax.__version__}",
            "import functools",
            "",
            "import jax",
            "import jax.numpy as jnp",
            "import numpy as np",
            "from jax import lax",
            "",
            "import sbp",
            "from sbp import AUTO, B, P, S",
            "",
            *([f"given = {{}}  # what no text can say: {', '.join(given.things)}"] if given.things else []),
            f'jax.config.update("jax_enable_x64", {jax.config.jax_enable_x64})',
            f'jax.config.update("jax_num_cpu_devices", {max(self.placement.ranks) + 1})',
            function,
            "",
            "",
            f"PLACEMENT = {placement_text(self.placement)}",
            "ARGUMENTS = (",
            *(f"    {line}" for line in arguments),
            ")",
            f"IN_SBP = ({''.join(f'{_signatures(nd)}, ' for nd in ins).rstrip()})",
            f"OUT_SBP = ({''.join(f'{_signatures(nd)}, ' for nd in self.out_sbp).rstrip()})",
            f"OPTIONS = {options_text(self.options)}",
            f"program = sbp.compile({name}, PLACEMENT, in_sbp=IN_SBP, out_sbp=OUT_SBP, "
            f"donate_argnums={tuple(self.donated)}, options=OPTIONS)",
            f"program.{failed}(*ARGUMENTS)",
        ]
        return "\n".join(lines) + "\n"


def trace(graph: Graph) -> TracedDevice:
    """A logical graph as a jaxpr whose equations know their ops; annotations stand in it."""
    steps = [(Compute(node, Strategy((), (), (), ())),) for node in graph.nodes]

    def run(*args: jax.Array) -> list[Any]:
        env: dict[int, Any] = dict(zip(graph.inputs, args, strict=True))
        for i, node in enumerate(graph.nodes):
            ins = [value_of(x, env) for x in node.inputs]
            with core.source_context(node.source.info, f"sbp.step{i}"):
                outs = ins[:1] if node.barrier >= 0 else core.bind(node.primitive, ins, dict(node.params))
            env.update(zip(node.outputs, outs, strict=True))
        return [value_of(x, env) for x in graph.outputs]

    avals = [core.struct(graph.values[v].shape, graph.values[v].dtype) for v in graph.inputs]
    closed = jax.make_jaxpr(run)(*avals)
    return TracedDevice(closed.jaxpr, [None] * len(avals), tuple(closed.consts), steps)


def placement_text(placement: Placement) -> str:
    """A placement as Python."""
    grid = np.reshape(placement.ranks, placement.shape).tolist()
    first = placement.ranks == tuple(range(placement.size))
    where = f"shape={placement.shape}" if first else str(grid)
    return f'sbp.placement("{placement.kind}", {where}, axes={placement.axes})'


def options_text(options: Any) -> str:
    """Options that are not the default, as Python; what cannot be written is left out."""
    said = []
    for f in dataclasses.fields(options):
        value, plain = getattr(options, f.name), f.default
        if f.default_factory is not dataclasses.MISSING:
            plain = f.default_factory()
        if value == plain:
            continue
        if dataclasses.is_dataclass(value) and type(value).__name__.endswith("Options"):
            said.append(f"{f.name}={options_text(value)}")
        elif isinstance(value, bool | int | float | str | tuple):
            said.append(f"{f.name}={value!r}")
    return f"sbp.{type(options).__name__}({', '.join(said)})"


def _signatures(nd: NdSbp | None) -> str:
    return "None" if nd is None else f"[{', '.join(map(signature, nd))}]"
