"""Arguments that are modules of a library: what a program may do with them, and what to pass instead.

No library is imported: a module is recognised by where its classes were defined.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from sbp.compat.untyped import Leaf, PyTree
from sbp.errors import Problem
from sbp.passes.program.graph import Const, Graph, Operand
from sbp.passes.program.trace import leaf_paths, trace

NNX, EQUINOX = "flax.nnx", "equinox"
INSTEAD = {
    NNX: "graph, state = nnx.split((model, optimizer)); pass state, use nnx.merge(graph, state) inside, and "
    "return nnx.state((model, optimizer))",
    EQUINOX: "params, static = eqx.partition(model, eqx.is_array); pass params, and use "
    "eqx.combine(params, static) inside",
}
"""Per library whose modules are pytrees: how a function of arrays is made of a module."""


def library_of(x: object) -> str:
    """The library of a module `x`, or "" for anything else; nnx.State, which holds arrays, is no module."""
    if isinstance(x, Mapping):
        return ""
    homes = [c.__module__ for c in type(x).__mro__]
    return next((lib for lib in INSTEAD for h in homes if h == lib or h.startswith(lib + ".")), "")


def libraries(tree: PyTree) -> list[str]:
    """Per leaf of a pytree the library of its module, or ""."""
    out: list[str] = []
    for x in jax.tree.leaves(tree, is_leaf=lambda x: bool(library_of(x)) or _is_mapping_of_arrays(x)):
        out += [library_of(x)] * len(jax.tree.leaves(x))
    return out


def _is_mapping_of_arrays(x: object) -> bool:
    """Whether `x` is a library's own mapping, such as nnx.State, whose variables are values."""
    return isinstance(x, Mapping) and not isinstance(x, dict)


def with_advice(problems: Sequence[Problem | None], tree: PyTree) -> list[Problem]:
    """The problems of leaves, None for valid ones; those of a module name what its library offers."""
    known = libraries(tree) if any(problems) else ()
    out = []
    for p, library in zip(problems, known, strict=False):
        if p is not None:
            wrong = p.kind == "argument" and p.why.startswith("JAX cannot take it")
            out.append(replace(p, fix=INSTEAD[library]) if library and wrong else p)
    return out


@dataclass
class ModuleWatch:
    """Runs a function and records which leaves it replaces inside nnx modules among its arguments.

    Arguments:
      fn: the function.
      static: positions of static arguments.
      replaced_leaves: the leaves, by their names; leaves that the results hold too are not lost.
    """

    fn: Callable[..., PyTree]
    static: Collection[int] = ()
    replaced_leaves: list[str] = field(default_factory=list)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """The result of the function."""
        before = self.variables(args, kwargs)
        out = self.fn(*args, **kwargs)
        if before:
            returned = {id(x) for x in jax.tree.leaves(out)}
            after = self.variables(args, kwargs)
            self.replaced_leaves[:] = [
                name for name, x in after.items() if x is not before.get(name) and id(x) not in returned
            ]
        return out

    def variables(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> dict[str, Leaf]:
        """The leaves of nnx modules, by their names."""
        at = [i for i in range(len(args)) if i not in self.static]
        traced = tuple(args[i] for i in at)
        held = libraries((traced, dict(kwargs)))
        if NNX not in held:
            return {}
        names = leaf_paths(self.fn, traced, kwargs, at)
        leaves = jax.tree.leaves((traced, dict(kwargs)))
        return {n: x for n, x, lib in zip(names, leaves, held, strict=True) if lib == NNX}

    def lost_changes(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[Problem]:
        """What the function changed in modules among its arguments, and did not return.

        Calls such as nnx.remat replace every variable of a module by itself: a trace tells these apart.

        Arguments:
          args, kwargs: of the function; static arguments as they are, the others may be shapes.
        """
        if not self.replaced_leaves:
            return []

        def values(*args: PyTree, **kwargs: PyTree) -> list[Leaf]:
            self.fn(*args, **kwargs)
            after = self.variables(args, kwargs)
            return [after[name] for name in self.replaced_leaves]

        traced = trace(functools.wraps(self.fn, updated=())(values), args, kwargs, sorted(self.static))
        arrived = dict(zip(traced.graph.inputs, traced.in_paths, strict=False))
        ends = zip(self.replaced_leaves, traced.graph.outputs, strict=True)
        return [_problem(name) for name, x in ends if _origin(traced.graph, x, arrived) != name]


def _origin(graph: Graph, x: Operand, arrived: Mapping[int, str]) -> str | None:
    """The argument leaf that a result is, if it is one: barriers change nothing."""
    made = graph.producers()
    while not isinstance(x, Const) and x in made and made[x].barrier >= 0:
        x = made[x].inputs[0]
    return None if isinstance(x, Const) else arrived.get(x)


def _problem(path: str) -> Problem:
    return Problem(
        "argument",
        path,
        "a variable of an nnx module that the function changes in place and does not return",
        "modules that only compute, or that are returned after they were changed",
        "inside, the module is a copy, as under jax.jit; the change would be lost silently",
        INSTEAD[NNX],
    )
