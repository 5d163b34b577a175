"""The program of one device as functions of a module: its own, and those of its equal parts."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sbp.compat import core
from sbp.passes.explain.plan import Collective
from sbp.passes.physical.program import Physical
from sbp.runtime.source.fold import Fold, without_copies
from sbp.runtime.source.ir import BlockBuilder
from sbp.runtime.source.lines import CodeLine, Writer, ids_in
from sbp.runtime.source.names import Hints
from sbp.runtime.source.text import GivenThings, Text, dtype_text, literal
from sbp.runtime.source.tracing import TracedDevice
from sbp.runtime.source.values import Block, Eqn, Var
from sbp.runtime.source.writer import NameHints, Printer

_SHORT = 32
"""Elements of an array that is written out."""
_KNOWN = ("jax", "jnp", "lax", "np", "sbp", "given", "extremum", "owned_sum", "all_product", "functools")


@dataclass(frozen=True)
class DeviceProgram:
    """What one device executes.

    Arguments:
      traced: it.
      physical: the program that it is of.
      paths: the names of the leaves of arguments and results of that.
      names: of what it is given; those of the leaves if there are none.
      numbered: whether it is given the number of a micro-batch first.
      annotated, scoped: whether annotations, and scopes, are kept.
    """

    traced: TracedDevice
    physical: Physical
    paths: tuple[Sequence[str], Sequence[str]]
    names: Sequence[str] = ()
    numbered: bool = False
    annotated: bool = False
    scoped: bool = False

    @cached_property
    def block(self) -> tuple[Block, BlockBuilder]:
        """Its equations."""
        build = BlockBuilder(annotated=self.annotated, scoped=self.scoped)
        entering = [None if x is None else build.constant(x) for x in self.traced.closed_arrays]
        if not self.numbered:
            return build.block(self.traced.jaxpr, entering, self.traced.consts), build
        number = build.var(self.traced.jaxpr.invars[0].aval)
        block = build.block(self.traced.jaxpr, [number, *entering[1:]], self.traced.consts)
        return replace(block, inputs=(number, *block.inputs)), build

    @cached_property
    def hints(self) -> Hints:
        """What its values may be called."""
        return Hints(self.physical.graph, self.paths, self.traced.steps, self.block[1].steps)

    @property
    def arguments(self) -> Sequence[str]:
        """The names of what it is given."""
        return self.names or self.hints.arguments


@dataclass
class DeviceWriter:
    """Writes programs of one device.

    Arguments:
      objects: takes what cannot be written.
      names: names of the module that are in use.
    """

    objects: GivenThings
    names: set[str]

    def functions(
        self,
        program: DeviceProgram,
        name: str,
        rows: Mapping[str, Collective],
        doc: str,
        *,
        empty: bool = False,
    ) -> list[str]:
        """The lines of a program's functions, its own the last.

        Arguments:
          name: of its own.
          rows: of the plan, by name.
          doc: what it does.
          empty: whether nothing that it is given has elements: then it makes that itself.
        """
        (block, build), hints = program.block, program.hints
        numbers = itertools.count(next(build.fresh))

        def keeps(eqn: Eqn, user: Eqn) -> bool:
            own, is_users = hints.of(eqn, True)
            return is_users and own != hints.of(user, True)[0]

        def place(eqn: Eqn) -> tuple[Any, ...]:
            source = hints.source(eqn.step)
            return source.file, source.line, hints.phase(eqn.step), eqn.scope

        writer = Writer(self.objects, keeps, place, lambda v: v.id in build.steps, numbers)
        writer.texts.update({v: self._constant(v, x) for v, x in build.constants.items()})
        lines, results = writer.block(block)
        names = NameHints(hints)
        names.names.update(zip((v.id for v in block.inputs), program.arguments, strict=True))
        names.learn([*lines, *writer.picks.values()])
        fold = Fold(
            numbers,
            lambda line: line.eqn and place(line.eqn),
            lambda line: hints.phase(line.step) == "update",
            lambda some: _title(hints, some),
            writer.picks,
        )
        result = f"({results[0]},)" if len(results) == 1 else ", ".join(results)
        main, result = without_copies(fold.lines(lines, ids_in(result)), result)
        called = _unique([f.wanted_name for f in fold.functions], self.names | {name, *_KNOWN})
        self.names |= set(called)
        by_id = dict(zip((f.id for f in fold.functions), called, strict=True))
        printer = Printer(names, rows, by_id)
        parts: list[str] = []
        for f, title in zip(fold.functions, called, strict=True):
            wanted = dict(names.names)
            names.forget_layers(f)
            said = f'"""Called {f.calls} times, with the tensors of each."""'
            parts += ["", "", *printer.function(title, f.params, f.lines, f.results, [said])]
            names.names = wanted
        params = [] if empty else [(v,) for v in block.inputs]
        main = [*(_made(v) for v in block.inputs), *main] if empty else main
        said = f'"""{doc}"""'
        return [*parts, "", "", *printer.function(name, params, main, result or "()", [said])]

    def _constant(self, v: Var, value: Any) -> Text:
        if v.shape and not core.is_key(v.dtype) and value.size <= _SHORT:
            return Text(literal(value, "constant", self.objects).replace("np.array", "jnp.array"))
        return Text(f"jnp.asarray({self.objects.name(value, 'constant')})")


def _made(v: Var) -> CodeLine:
    """A shard without elements, which no program is given."""
    return CodeLine((v,), f"jnp.zeros({v.shape}, {dtype_text(v.dtype)})", None)


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
