"""Traces, plans and builds the function of a `Program`, once per abstract signature."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast

import jax

from sbp import lazy
from sbp.compat.core import trace_context
from sbp.compat.forks import FORK, check_not_forked
from sbp.compat.mesh import explicit_types, mesh_key
from sbp.compat.untyped import Leaf, Prefix, PyTree
from sbp.errors import ArgumentError, raise_all
from sbp.options import Options
from sbp.passes.pass_manager import collector_paused
from sbp.passes.program.trace import is_same_program
from sbp.placement import Placement, as_placement
from sbp.rules import REGISTRY
from sbp.runtime.call import arguments, modules
from sbp.runtime.call.binding import Call, Parameters
from sbp.runtime.call.donation import Owners, layouts_of
from sbp.runtime.call.in_sbp_binding import bind_in_sbp
from sbp.runtime.call.usage_errors import not_planned
from sbp.runtime.compile.traced_call import TracedCall, build, read
from sbp.runtime.execute.build_cache import BuildCache, BuildSlot
from sbp.runtime.execute.compile_log import Shapes, log_activity, why_built
from sbp.runtime.execute.compiled_program import CompiledProgram
from sbp.runtime.nan_checks import findings
from sbp.runtime.pipeline.program import CompiledPipeline
from sbp.runtime.source.reproduction import Reproduction
from sbp.text.user_warnings import warn_user

P = ParamSpec("P")
R = TypeVar("R")


class Compilation(Generic[P, R]):
    """A function with its options, and what was built of it.

    Arguments:
      fn, placement, in_sbp, out_sbp, options: as in `compile`.
      own: the parameters of the function.
    """

    def __init__(
        self,
        fn: Callable[P, R],
        placement: Placement | jax.sharding.Mesh,
        in_sbp: Prefix,
        out_sbp: Prefix,
        own: Parameters,
        options: Options,
    ) -> None:
        functools.update_wrapper(cast(Any, self), fn, updated=())
        self.fn, self.placement = fn, as_placement(placement, "compile(fn, placement)")
        self.in_sbp, self.out_sbp, self.parameters, self.options = in_sbp, out_sbp, own, options
        self._built: BuildCache[CompiledProgram | CompiledPipeline] = BuildCache()
        self._seen: dict[Hashable, BuildSlot[CompiledProgram | CompiledPipeline]] = {}
        self._latest: (
            tuple[Call, CompiledProgram | CompiledPipeline, tuple[arguments.Abstract, ...]] | None
        ) = None
        self._asked: tuple[Call, tuple[arguments.Abstract, ...]] | None = None
        self._next: tuple[tuple[PyTree, ...], dict[str, PyTree]] | None = None
        self._shapes: list[Shapes] = []

    def __repr__(self) -> str:
        return f"<Program {getattr(self.fn, '__name__', self.fn)} on {self.placement}>"

    def _prepare(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], *, concrete: bool = False
    ) -> tuple[Call, CompiledProgram | CompiledPipeline]:
        """The bound arguments of a call, and the program for their abstract signature."""
        if concrete:
            check_not_forked(f"{self}(...)")
        call = self.parameters.take(args, kwargs)
        return call, self._slot(call, concrete).build

    def _to_run(self, call: Call) -> CompiledProgram | CompiledPipeline:
        """The program for a call with values; a call like an earlier one is not checked again."""
        if FORK.parent is not None:
            check_not_forked(f"{self}(...)")
        seen = arguments.leaves_key(call.leaves)
        key: Hashable = None
        if seen is not None:
            key = (call.tree, call.values(), seen, self._settings(), self._mesh(()))
        try:
            slot = self._seen.get(key) if key is not None else None
        except TypeError:  # a static argument without a hash
            slot = None
        if slot is None:
            slot = self._slot(call, concrete=True)
            if key is not None:
                self._seen[key] = slot
        return slot.build

    def _settings(self) -> Hashable:
        """What a build depends on besides arguments: JAX's settings, and the rules."""
        return (*trace_context(), REGISTRY.version, findings.refused_by(self.options))

    def _mesh(self, leaves: Sequence[Leaf]) -> Hashable:
        """What a trace depends on besides: the user's mesh, with the types that it gives to arguments."""
        return mesh_key(), explicit_types(leaves)

    def _slot(self, call: Call, concrete: bool) -> BuildSlot[CompiledProgram | CompiledPipeline]:
        """The slot of the abstract signature of a valid call."""
        self._check(call, concrete)
        avals = tuple(map(arguments.abstract, call.leaves))
        self._asked = call.without_values(), avals
        placement = arguments.with_types(self.placement, call.leaves)
        settings = self._settings(), placement.axis_types
        key = (call.tree, call.values(), avals, settings, self._mesh(call.leaves))
        slot, same = self._built.slot(key), self._built.siblings(key)

        def is_stale(built: CompiledProgram | CompiledPipeline) -> bool:
            """What was planned without a batch is planned again once there is one to plan exchanges from."""
            return concrete and built.lacks_samples

        usable = [b for b in same if not is_stale(b)]
        built = slot.get(is_stale, lambda: self._build(call, avals, placement, concrete, usable))
        self._latest = call.without_values(), built, avals
        return slot

    def _check(self, call: Call, concrete: bool) -> None:
        """Raises for invalid arguments, together with the problems of in_sbp."""
        names = functools.partial(call.paths, self.fn)
        missing = list(self.parameters.check(call))
        found = [arguments.check_leaf(x, i, names, concrete) for i, x in enumerate(call.leaves)]
        problems = [
            *missing,
            *modules.with_advice(found, call.trace_args(call.leaves)),
            *arguments.check_static(call.values()),
        ]
        if concrete and not problems:
            owners = Owners(call.donated_leaves(self.parameters.donate))
            problems += owners.check(call.leaves, layouts_of(call.leaves), names)
        if problems and not missing:
            known = [arguments.NOT_TAKEN if p else x for p, x in zip(found, call.leaves, strict=True)]
            asked = bind_in_sbp(self.in_sbp, call, self.parameters)
            problems += asked.resolve(*call.trace_args(known), names(), self.placement)[1]
        raise_all(problems)

    @collector_paused()
    def _build(
        self,
        call: Call,
        avals: Sequence[arguments.Abstract],
        placement: Placement,
        concrete: bool,
        same: Sequence[CompiledProgram | CompiledPipeline] = (),
    ) -> CompiledProgram | CompiledPipeline:
        """Traces and plans for one abstract signature.

        Arguments:
          placement: with the types of axes that its results have.
          concrete: of a call that will run.
          same: builds for that signature under other meshes of the user.
        """
        name, now = getattr(self.fn, "__name__", "program"), Shapes(call.paths(self.fn), tuple(avals))
        with log_activity("traced", name, why_built(now, self._shapes)):
            traced_call = self._read(call, avals)
        for built in same:
            if is_same_program(built.traced, traced_call.traced):
                return built
        self._shapes.append(now)
        with log_activity("planned", name, f" for {self.placement}"):
            built = build(traced_call, placement, self.in_sbp, self.out_sbp, self.options, concrete)
        for note in built.plan.notes:
            if lazy.WHOLE in note:
                warn_user(f'{note}; sbp.rows(..., dense="error") refuses such a step')
        return built

    def _reproduction(self, failed: str, said: str) -> str:
        """The program of the last call as Python that runs alone, to reproduce an error.

        Arguments:
          failed: the entry that fails: "plan" or "lower".
          said: the text of the error.
        """
        if self._asked is None:
            raise ArgumentError(not_planned(self, "reproduction(...)"))
        call, avals = self._asked
        call = call.with_leaves(list(map(arguments.struct, avals)))
        traced_call = self._read(call, avals)
        ins, outs, _ = traced_call.signatures(self.in_sbp, self.out_sbp).on(self.placement)
        name, donated = getattr(self.fn, "__name__", "program"), call.donated_leaves(self.parameters.donate)
        made = Reproduction(name, traced_call.traced, self.placement, ins, outs, self.options, donated)
        return made.text(failed, said)

    @collector_paused()
    def _read(self, call: Call, avals: Sequence[arguments.Abstract]) -> TracedCall:
        asked = bind_in_sbp(self.in_sbp, call, self.parameters)
        return read(self.fn, call, self.parameters, avals, asked, self.placement)
