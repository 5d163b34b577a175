"""`compile` and `Program`: traced, planned and compiled on the first call per abstract signature, like `jax.jit`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from sbp.errors import Problem, raise_all
from sbp.hardware import hardware_for
from sbp.options import Options
from sbp.passes.chain import Request, compile_plan
from sbp.passes.explain import Plan
from sbp.passes.trace import Traced, trace
from sbp.placement import Placement
from sbp.runtime import arguments
from sbp.runtime.lower import lower, shardings
from sbp.signature import AUTO


@dataclass
class Built:
    """One compiled signature of a program: made on its first call, run on every later one."""

    traced: Traced
    plan: Plan
    donate: tuple[int, ...]
    moved: dict[str, str] = field(default_factory=dict)

    @functools.cached_property
    def executable(self) -> tuple[Any, list[Any], list[Any]]:
        """The jitted program, the shardings of its arguments, and the placed arrays that the function closes over."""
        physical = self.plan.physical
        assert physical is not None
        mesh = physical.placement.mesh
        ins, _ = shardings(physical, mesh)
        jitted = lower(physical, mesh, self.donate)
        n = len(self.traced.in_paths)
        consts = [jax.device_put(c, s) for c, s in zip(physical.graph.consts, ins[n:], strict=True)]
        return jitted, ins, consts

    def place(self, leaves: Sequence[Any]) -> list[Any]:
        """Arguments where the program wants them; one that lay otherwise is moved, and named once."""
        _, ins, _ = self.executable
        return [
            self._moved(i, x, s) if isinstance(x, jax.Array) and x.sharding != s and x.committed else x
            for i, (x, s) in enumerate(zip(leaves, ins, strict=False))
        ]

    def _moved(self, i: int, x: Any, sharding: Any) -> Any:
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        path = self.traced.in_paths[i]
        if path not in self.moved and len(x.sharding.device_set) > 1:
            self.moved[path] = f"{path} arrived as {x.sharding.spec if hasattr(x.sharding, 'spec') else x.sharding}"
            warnings.warn(
                f"sbp: {self.moved[path]} and is moved to {sharding.spec} on every call; "
                "place it once with jax.device_put, or give in_sbp the signature that it has",
                stacklevel=5,
            )
        return jax.device_put(x, sharding)


class Program:
    """A distributed program; call it like the function it was made from. Made by `sbp.compile`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        placement: Placement,
        in_sbp: Any,
        out_sbp: Any,
        donate_argnums: Sequence[int],
        static_argnums: Sequence[int],
        options: Options,
    ) -> None:
        self.fn, self.placement = fn, placement
        self.in_sbp, self.out_sbp = in_sbp, out_sbp
        self.donate_argnums, self.static_argnums = tuple(donate_argnums), tuple(static_argnums)
        self.options = options
        self._built: dict[Any, Built] = {}
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program on logical arrays; host arrays are placed.

        Raises:
          SbpError: for arguments, signatures or annotations that cannot be taken, all of them at once.
        """
        leaves, built = self._prepare(args, kwargs)
        jitted, _, consts = built.executable
        out = jitted(*built.place(leaves), *consts)
        return jax.tree.unflatten(built.traced.out_tree, out)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """What the program will do with such arguments (arrays or `ShapeDtypeStruct`s); needs none of the devices."""
        built = self._prepare(args, kwargs)[1]
        if not built.moved:
            return built.plan
        return replace(built.plan, notes=(*built.plan.notes, *(f"{m}: moved" for m in built.moved.values())))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered program, as `jax.stages.Lowered`; without the devices it can be read but not compiled."""
        leaves, built = self._prepare(args, kwargs)
        physical = built.plan.physical
        assert physical is not None
        avals = [arguments.abstract(x) for x in (*leaves, *physical.graph.consts)]
        mesh = self._mesh()
        if mesh is not None:
            return built.executable[0].lower(*avals)
        jitted = lower(physical, self.placement.abstract_mesh, built.donate)
        platform = {"gpu": "cuda"}.get(self.placement.platform, self.placement.platform)
        return jitted.trace(*avals).lower(lowering_platforms=(platform,))

    def _mesh(self) -> Any:
        try:
            return self.placement.mesh
        except ValueError:
            return None

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Built]:
        """The dynamic leaves of a call, and the program built for their abstract signature."""
        dynamic = tuple(a for i, a in enumerate(args) if i not in self.static_argnums)
        static = tuple(args[i] for i in self.static_argnums if i < len(args))
        leaves, tree = jax.tree.flatten((dynamic, kwargs))
        raise_all(arguments.check_leaves(leaves, _Paths(dynamic, kwargs)))
        avals = tuple(arguments.abstract(x) for x in leaves)
        key = tree, static, avals, jax.config.read("jax_enable_x64")
        if key not in self._built:
            self._built[key] = self._build(args, kwargs, dynamic, tree, avals)
        return leaves, self._built[key]

    def _build(self, args: tuple[Any, ...], kwargs: Any, dynamic: Any, tree: Any, avals: Sequence[Any]) -> Built:
        abstract_args, abstract_kwargs = jax.tree.unflatten(tree, avals)
        rest = iter(abstract_args)
        full = [a if i in self.static_argnums else next(rest) for i, a in enumerate(args)]
        traced = trace(self.fn, full, abstract_kwargs, self.static_argnums)
        out = jax.tree.unflatten(traced.out_tree, [traced.graph.operand(x) for x in traced.graph.outputs])
        ins, wrong = arguments.resolve_inputs(
            self.in_sbp, abstract_args, abstract_kwargs, traced.in_paths, self.placement
        )
        outs, also = arguments.resolve_outputs(self.out_sbp, out, traced.out_paths, self.placement)
        problems: list[Problem] = [*wrong, *also]
        raise_all(problems)
        request = Request(
            name=getattr(self.fn, "__name__", "program"),
            placement=self.placement,
            hardware=self.options.hardware or hardware_for(self.placement.kind),
            in_sbp=tuple(ins),
            out_sbp=tuple(outs),
            ties=arguments.ties(abstract_args, out, outs),
            time_limit_seconds=self.options.time_limit,
        )
        plan = compile_plan(traced, request, check=bool(self.options.check))
        return Built(traced, plan, self._donated(args))

    def _donated(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Positions of the donated leaves."""
        out, start = [], 0
        for i, a in enumerate(args):
            if i in self.static_argnums:
                continue
            n = len(jax.tree.leaves(a))
            out += range(start, start + n) if i in self.donate_argnums else []
            start += n
        return tuple(out)


class _Paths(Sequence[str]):
    """Names of argument leaves, computed only when an error needs them."""

    def __init__(self, args: tuple[Any, ...], kwargs: Any) -> None:
        self.tree = args, kwargs

    @functools.cached_property
    def names(self) -> list[str]:
        found = jax.tree_util.tree_flatten_with_path(self.tree)[0]
        return [
            (f"argument {p[1].idx}" if p[0].idx == 0 else str(p[1].key)) + jax.tree_util.keystr(p[2:])
            for p, _ in found
        ]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: Any) -> Any:
        return self.names[i]


def compile(
    fn: Callable[..., Any],
    placement: Placement,
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
      placement: the devices.
      in_sbp: a pytree prefix of signatures for the positional arguments that are not static; AUTO is chosen.
      out_sbp: the same for the results; state that comes back keeps its argument's signature.
      donate_argnums: arguments whose memory the results may take.
      static_argnums: arguments that are Python values.
      options: limits, hardware, checks.

    >>> import jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> double = compile(lambda x: x * 2, placement("cpu", shape=(1,)))
    >>> double(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    if not isinstance(placement, Placement):
        raise_all([_not_a_placement(placement)])
    donate = (donate_argnums,) if isinstance(donate_argnums, int) else donate_argnums
    static = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    return Program(fn, placement, in_sbp, out_sbp, donate, static, options or Options())


def _not_a_placement(got: Any) -> Problem:
    mesh = isinstance(got, jax.sharding.Mesh)
    return Problem(
        "placement",
        "compile(fn, placement)",
        f"{got!r:.80}",
        "an sbp.placement",
        "the second argument says which devices the program runs on",
        "sbp.Placement.from_mesh(mesh)" if mesh else "sbp.placement('cpu', shape=(8,))",
    )
