"""`compile` and `Program`: traced, planned and compiled on the first call per abstract signature, as jit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from sbp.errors import ArgumentError, PlacementError, SbpError, raise_all
from sbp.hardware import hardware_for
from sbp.options import Options
from sbp.passes.chain import Request, compile_plan
from sbp.passes.explain import Plan
from sbp.passes.lookups import Transfer
from sbp.passes.pins import check_annotations
from sbp.passes.trace import Traced, leaf_paths, trace
from sbp.placement import Placement, as_placement
from sbp.runtime import arguments, modules
from sbp.runtime.counts import Counting, KeyCount
from sbp.runtime.lower import Title, lower, shardings
from sbp.runtime.pipeline.build import Signatures, build_pipeline, is_pipeline
from sbp.runtime.pipeline.profile import Profile, measure
from sbp.runtime.pipeline.program import BuiltPipeline, many_programs, unstaged
from sbp.runtime.rooms import give_room, rooms_of
from sbp.signature import AUTO

# Settings of JAX that a traced program depends on, as those of jit do.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call, taken apart.

    Arguments:
      args, kwargs: as given.
      static: positions of the arguments that are not traced.
      leaves, tree: of the others.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    static: frozenset[int]
    leaves: list[Any]
    tree: Any

    @staticmethod
    def take(args: tuple[Any, ...], kwargs: Mapping[str, Any], static: Sequence[int]) -> Call:
        """Takes a call apart; negative positions count from the end."""
        at = frozenset(i % len(args) for i in static if -len(args) <= i < len(args))
        dynamic = tuple(a for i, a in enumerate(args) if i not in at) if at else args
        return Call(args, kwargs, at, *jax.tree.flatten((dynamic, dict(kwargs))))

    def traced(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments that are not static, with other leaves."""
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs

    def full(self, dynamic: Sequence[Any]) -> list[Any]:
        """All positional arguments, those that are not static replaced."""
        rest = iter(dynamic)
        return [a if i in self.static else next(rest) for i, a in enumerate(self.args)]

    def values(self) -> tuple[Any, ...]:
        """The static arguments, with their types: 1, 1.0 and True are equal, but not the same program."""
        at = sorted(self.static) if self.static else ()
        return tuple([(i, type(self.args[i]), self.args[i]) for i in at])

    def donated(self, argnums: Sequence[int]) -> tuple[int, ...]:
        """Positions of the leaves of arguments."""
        n = len(self.args)
        given = {i % n for i in argnums if -n <= i < n}
        out: list[int] = []
        start = 0
        for i, a in enumerate(self.args):
            size = 0 if i in self.static else len(jax.tree.leaves(a))
            out += range(start, start + size) if i in given else ()
            start += size
        return tuple(out)

    def paths(self, fn: Callable[..., Any]) -> tuple[str, ...]:
        """A name per leaf."""
        at = [i for i in range(len(self.args)) if i not in self.static]
        return leaf_paths(fn, tuple(self.args[i] for i in at), self.kwargs, at)


@dataclass
class Built:
    """One compiled signature of a program: made on its first call, run on every later one."""

    traced: Traced
    plan: Plan
    donate: tuple[int, ...]
    weak: tuple[bool, ...]
    lacks_samples: bool = False
    counting: Counting | None = None
    request: Request | None = None
    moved: dict[str, str] = field(default_factory=dict)

    def jitted(self, mesh: Any, counting: Counting | None = None) -> Any:
        """The program over a mesh: flat arguments in, flat results out, and counts if something counts."""
        physical = self.plan.physical
        assert physical is not None
        title = Title(self.plan.name, self.traced.source)
        return lower(physical, mesh, self.donate, counting, title, self.weak)

    @functools.cached_property
    def executable(self) -> tuple[Any, list[Any], list[Any]]:
        """The jitted program, the shardings of its arguments, and the closed-over arrays."""
        physical = self.plan.physical
        assert physical is not None
        mesh = physical.placement.mesh
        ins, _ = shardings(physical, mesh)
        n = len(self.traced.in_paths)
        consts = [jax.device_put(c, s) for c, s in zip(physical.graph.consts, ins[n:], strict=True)]
        return self.jitted(mesh, self.counting), ins, consts

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs the program on the leaves of a call."""
        jitted, _, consts = self.executable
        placed = self.place(leaves)
        out = jitted(*placed, *consts)
        if self.counting is not None:
            *out, counts = out
            self.counting.add(counts)
        for i in self.donate:
            # What had to be moved was donated as a copy; donation promises that the original is gone too.
            if isinstance(leaves[i], jax.Array) and not leaves[i].is_deleted():
                leaves[i].delete()
        return jax.tree.unflatten(self.traced.out_tree, out)

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves as the program wants them: jit would compile once more for what it moves itself."""
        _, ins, _ = self.executable
        placed = list(leaves)
        away = [i for i, (x, s) in enumerate(zip(leaves, ins, strict=False)) if not _lies(x, s)]
        for i in away:
            self._note_move(i, leaves[i], ins[i])
        moved = jax.device_put([leaves[i] for i in away], [ins[i] for i in away]) if away else ()
        for i, x in zip(away, moved, strict=True):
            placed[i] = x
        return placed

    def _note_move(self, i: int, x: Any, sharding: Any) -> None:
        """Warns, once, of an argument that already lies on several devices, but otherwise."""
        if not isinstance(x, jax.Array) or not x.committed or len(x.sharding.device_set) == 1:
            return
        path = self.traced.in_paths[i]
        if path not in self.moved and not x.sharding.is_equivalent_to(sharding, x.ndim):
            self.moved[path] = f"{path} arrived as {getattr(x.sharding, 'spec', x.sharding)}"
            warnings.warn(
                f"sbp: {self.moved[path]} and is moved to {sharding.spec} on every call; "
                "place it once with jax.device_put, or give in_sbp the signature that it has",
                stacklevel=5,
            )


def _lies(x: Any, sharding: Any) -> bool:
    """Whether a leaf already lies as the program wants it."""
    return isinstance(x, jax.Array) and x.committed and x.sharding == sharding


class Program:
    """A distributed program; call it like the function it was made from. Made by `sbp.compile`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        placement: Placement | jax.sharding.Mesh,
        in_sbp: Any,
        out_sbp: Any,
        donate_argnums: Sequence[int],
        static_argnums: Sequence[int],
        options: Options,
    ) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.fn, self.placement = fn, as_placement(placement, "compile(fn, placement)")
        self.in_sbp, self.out_sbp = in_sbp, out_sbp
        self.donate_argnums, self.static_argnums = tuple(donate_argnums), tuple(static_argnums)
        self.options = options
        self._built: dict[Any, Built | BuiltPipeline] = {}

    def __repr__(self) -> str:
        return f"<Program {getattr(self.fn, '__name__', self.fn)} on {self.placement}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on logical arrays; host arrays are placed.

        Raises:
          SbpError: for arguments, signatures or annotations that cannot be taken, all of them at once.
        """
        call, built = self._prepare(args, kwargs, concrete=True)
        if jax.config.jax_debug_nans or jax.config.jax_debug_infs:
            from sbp.runtime import nonfinite

            return nonfinite.run(built, call.leaves)
        return built.run(call.leaves)

    def place(self, *args: Any) -> tuple[Any, ...]:
        """The arguments of a call as the program wants them: what is placed once is not moved on every call.

        Raises:
          SbpError: as a call does.

        >>> import jax.numpy as jnp
        >>> from sbp.placement import placement
        >>> double = compile(lambda x: x * 2, placement("cpu", shape=(1,)))
        >>> (x,) = double.place(jnp.ones(2))
        >>> x.committed
        True
        """
        call, built = self._prepare(args, {}, concrete=True)
        (dynamic, _) = jax.tree.unflatten(call.tree, built.place(call.leaves))
        return tuple(call.full(dynamic))

    def key_counts(self) -> tuple[KeyCount, ...]:
        """What every sparse exchange has been given and has served, with `Options(count_keys=True)`.

        Exchanges inside loops are not counted.
        """
        return tuple(c for b in self._built.values() if b.counting is not None for c in b.counting.read())

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What the program will do with such arguments (arrays or `ShapeDtypeStruct`s); needs no devices.

        Raises:
          SbpError: as a call does.
        """
        built = self._prepare(args, kwargs)[1]
        if not built.moved:
            return built.plan
        return replace(built.plan, notes=(*built.plan.notes, *(f"{m}: moved" for m in built.moved.values())))

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Runs some steps with these arguments and measures them; donated ones are copied, and still there.

        Of a program with stages and micro-batches every action is measured, against the plan's estimate; of
        any other one the whole step. `key_counts` counts the steps too.

        Raises:
          SbpError: as a call does.
        """
        call, built = self._prepare(args, kwargs, concrete=True)
        return measure(built, call.leaves)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program, as `jax.stages.Lowered`; without the devices it can be read but not compiled.

        Raises:
          SbpError: as a call does.
        """
        call, built = self._prepare(args, kwargs)
        if isinstance(built, BuiltPipeline):
            raise ArgumentError(many_programs(self))
        physical = built.plan.physical
        assert physical is not None
        avals = [arguments.struct(arguments.abstract(x)) for x in (*call.leaves, *physical.graph.consts)]
        try:
            mesh = self.placement.mesh
        except PlacementError:
            platform = {"gpu": "cuda"}.get(self.placement.platform, self.placement.platform)
            traced = built.jitted(self.placement.abstract_mesh).trace(*avals)
            return traced.lower(lowering_platforms=(platform,))
        return built.jitted(mesh).lower(*avals)

    def _prepare(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, concrete: bool = False
    ) -> tuple[Call, Built | BuiltPipeline]:
        """A call taken apart, and the program built for its abstract signature."""
        call = Call.take(args, kwargs, self.static_argnums)
        self._check(call, concrete)
        avals = tuple(map(arguments.abstract, call.leaves))
        settings = tuple(getattr(jax.config, name) for name in SETTINGS)
        key = call.tree, call.values(), avals, settings
        built = self._built.get(key)
        # What was planned without a batch is planned again once there is one to plan exchanges from.
        if built is None or (concrete and built.lacks_samples):
            self._built[key] = self._build(call, avals, concrete)
        elif concrete and built.counting is not None:
            give_room(built, call.leaves)
        return call, self._built[key]

    def _check(self, call: Call, concrete: bool) -> None:
        """Raises for arguments that cannot be taken, together with what is wrong with in_sbp."""
        names = functools.partial(call.paths, self.fn)
        found = [arguments.check_leaf(x, i, names, concrete) for i, x in enumerate(call.leaves)]
        problems = modules.advised(found, call.traced(call.leaves))
        problems += arguments.check_static(call.values())
        if concrete and self.donate_argnums:
            problems += arguments.check_donated(call.leaves, call.donated(self.donate_argnums), names)
        if problems:
            known = [arguments.NOT_TAKEN if p else x for p, x in zip(found, call.leaves, strict=True)]
            dynamic, named = call.traced(known)
            _, wrong = arguments.resolve_inputs(self.in_sbp, dynamic, named, names(), self.placement)
            raise_all([*problems, *wrong])

    def _build(
        self, call: Call, avals: Sequence[arguments.Abstract], concrete: bool
    ) -> Built | BuiltPipeline:
        """Traces and plans for one abstract signature; `concrete`: of a call that will run."""
        args, kwargs = call.traced([arguments.struct(a) for a in avals])
        weak: list[bool] = []
        watch = modules.Watch(self.fn, call.static)

        @functools.wraps(self.fn, updated=())
        def watched(*args: Any, **kwargs: Any) -> Any:
            out = watch(*args, **kwargs)
            weak[:] = map(arguments.is_weak, jax.tree.leaves(out))
            return out

        try:
            traced = trace(watched, call.full(args), kwargs, sorted(call.static))
        except Exception as e:
            problems = arguments.misread(self.in_sbp, args, kwargs, call.paths(self.fn), self.placement)
            raise_all([*problems, *(e.problems if isinstance(e, SbpError) else ())] if problems else ())
            raise
        raise_all(watch.lost(call.full(args), kwargs))
        graph = traced.graph
        out = jax.tree.unflatten(traced.out_tree, [graph.operand(x) for x in graph.outputs])
        signatures = Signatures(traced, args, kwargs, out, self.in_sbp, self.out_sbp)
        name, donate = getattr(self.fn, "__name__", "program"), call.donated(self.donate_argnums)
        if is_pipeline(graph, self.placement) or self.options.stages is not None:
            return build_pipeline(signatures, self.placement, self.options, name, donate, tuple(weak))
        if self.options.schedule is not None:
            raise ArgumentError(unstaged(self.options.schedule))
        ins, outs, problems = signatures.on(self.placement)
        problems += check_annotations(graph, self.placement)
        if self.options.plan is not None:
            ins, outs, wrong = arguments.adopt(self.options.plan, traced, ins, outs, self.placement)
            problems += wrong
        raise_all(problems)
        request = Request(
            name=name,
            placement=self.placement,
            hardware=self.options.hardware or hardware_for(self.placement.kind),
            in_sbp=tuple(ins),
            out_sbp=tuple(outs),
            ties=arguments.ties(args, out, outs),
            time_limit_seconds=self.options.time_limit,
            memory_limit_bytes=self.options.memory_limit_bytes,
            transfer=Transfer(self.options.exchange_capacity, self.options.exchange_dtype),
            strict_nonfinite=self.options.strict_nonfinite,
            example=tuple(call.leaves),
            donated=donate,
        )
        plan = compile_plan(traced, request, check=bool(self.options.check))
        lacking, count = rooms_of(plan, concrete, self.options.count_keys)
        return Built(traced, plan, donate, tuple(weak), lacking, count, request)


def compile(
    fn: Callable[..., Any],
    placement: Placement | jax.sharding.Mesh,
    *,
    in_sbp: Any = AUTO,
    out_sbp: Any = AUTO,
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    options: Options | None = None,
) -> Program:
    """Makes a distributed program of a single-device JAX function.

    Arguments:
      fn: any JAX function over pytrees: a model, its loss, a whole train step.
      placement: the devices: an `sbp.placement`, or a `jax.sharding.Mesh`.
      in_sbp: a pytree prefix of signatures for the positional arguments that are not static; AUTO is chosen.
      out_sbp: the same for the results; state that comes back keeps its argument's signature.
      donate_argnums: arguments whose memory the results may take; they are gone after the call.
      static_argnums: arguments that are Python values; negative positions count from the end of the call.
      options: limits, hardware, checks.

    Raises:
      SbpError: for arguments that are not what they should be, all of them at once.

    >>> import jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> double = compile(lambda x: x * 2, placement("cpu", shape=(1,)))
    >>> double(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    donate, wrong = arguments.positions(donate_argnums, fn, "donate_argnums")
    static, also = arguments.positions(static_argnums, fn, "static_argnums")
    both = sorted(set(donate) & set(static))
    raise_all([*arguments.check_compile(fn, placement, options, both), *wrong, *also])
    return Program(fn, placement, in_sbp, out_sbp, donate, static, options or Options())
