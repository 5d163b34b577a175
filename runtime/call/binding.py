"""Binds the arguments of a call: keywords at their positions, static arguments apart, others as leaves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeAlias

import jax

from sbp.compat.untyped import Leaf, PyTree, TreeDef
from sbp.errors import Problem
from sbp.passes.program.trace import leaf_paths

Kind = inspect.Parameter
Static: TypeAlias = tuple[int | str, type, object]
"""A static argument: its position or its name, its type, and itself."""


@dataclass(frozen=True, slots=True)
class ChosenParameters:
    """Some parameters of a function: by position, and by name if they are passed by keyword.

    Arguments:
      argnums: as given; negative ones are counted from the front, if the function has a known number of
        parameters.
      argnames: as given, with the names of the positions, and the other way round.
    """

    argnums: tuple[int, ...] = ()
    argnames: frozenset[str] = frozenset()

    def positions(self, n: int) -> frozenset[int]:
        """The positions among `n` arguments; negative ones count from the end."""
        return frozenset(i % n for i in self.argnums if -n <= i < n)


@dataclass(frozen=True)
class Call:
    """The bound arguments of one call.

    Arguments:
      args, kwargs: all of them; a keyword argument stands at its position, if those before it do.
      static, static_names: positions and names of static arguments.
      leaves, tree: of the others, as a pair of positional and keyword arguments.
    """

    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree]
    static: frozenset[int]
    static_names: tuple[str, ...]
    leaves: list[Leaf]
    tree: TreeDef

    def trace_args(self, leaves: Sequence[Leaf]) -> tuple[tuple[PyTree, ...], Mapping[str, PyTree]]:
        """The arguments that are not static, with other leaves."""
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs

    def full(self, dynamic: Sequence[PyTree]) -> list[PyTree]:
        """All positional arguments, with those that are not static replaced."""
        rest = iter(dynamic)
        return [a if i in self.static else next(rest) for i, a in enumerate(self.args)]

    @property
    def static_kwargs(self) -> dict[str, Any]:
        """The static keyword arguments."""
        return {k: self.kwargs[k] for k in self.static_names}

    def without_values(self) -> Call:
        """The same without the values of traced arguments: it holds no memory."""
        return replace(self.with_leaves([None] * len(self.leaves)), leaves=[])

    def with_leaves(self, leaves: Sequence[Leaf]) -> Call:
        """The same with other leaves."""
        args, kwargs = self.trace_args(leaves)
        named = {**kwargs, **self.static_kwargs}
        return replace(self, args=tuple(self.full(args)), kwargs=named, leaves=list(leaves))

    def values(self) -> tuple[Static, ...]:
        """The static arguments, with their types: 1, 1.0 and True are equal, but make other programs."""
        if not self.static and not self.static_names:
            return ()
        given: list[tuple[int | str, object]] = [(i, self.args[i]) for i in sorted(self.static)]
        return tuple((at, type(x), x) for at, x in (*given, *self.static_kwargs.items()))

    @property
    def at(self) -> list[int]:
        """The positions of the arguments that are not static."""
        return [i for i in range(len(self.args)) if i not in self.static]

    def donated_leaves(self, chosen: ChosenParameters) -> tuple[int, ...]:
        """Positions of the leaves of chosen arguments."""
        given = chosen.positions(len(self.args))
        parts = [(i in given, self.args[i]) for i in self.at]
        # As JAX orders the entries of a dict.
        parts += [
            (k in chosen.argnames, self.kwargs[k]) for k in sorted(self.kwargs) if k not in self.static_names
        ]
        out: list[int] = []
        start = 0
        for taken, tree in parts:
            size = len(jax.tree.leaves(tree))
            out += range(start, start + size) if taken else ()
            start += size
        return tuple(out)

    def paths(self, fn: Callable[..., object]) -> tuple[str, ...]:
        """A name per leaf."""
        kwargs = {k: v for k, v in self.kwargs.items() if k not in self.static_names}
        return leaf_paths(fn, tuple(self.args[i] for i in self.at), kwargs, self.at)


@dataclass(frozen=True)
class Parameters:
    """The parameters of a function, as `compile` uses them.

    Arguments:
      name: of the function.
      positional: names of the positional parameters; None if the function has no signature.
      positional_only: how many of them cannot be passed by keyword.
      required_names: names of all parameters without a default.
      rest: the name of `*args`, if there is one; `others`: names of keyword-only parameters.
      any_keyword: whether it takes all keywords.
      static, donate: the static and the donated parameters.
    """

    name: str
    positional: tuple[str, ...] | None = None
    positional_only: int = 0
    required_names: tuple[str, ...] = ()
    rest: str | None = None
    others: tuple[str, ...] = ()
    any_keyword: bool = True
    static: ChosenParameters = ChosenParameters()
    donate: ChosenParameters = ChosenParameters()

    @staticmethod
    def of(fn: Callable[..., object]) -> Parameters:
        """The parameters of a function; some builtins have no signature."""
        name = getattr(fn, "__name__", "the function")
        try:
            found = list(inspect.signature(fn).parameters.values())
        except (TypeError, ValueError):
            return Parameters(name)

        def named(*kinds: object) -> tuple[str, ...]:
            return tuple(p.name for p in found if p.kind in kinds)

        many = (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)
        return Parameters(
            name,
            named(Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD),
            len(named(Kind.POSITIONAL_ONLY)),
            tuple(p.name for p in found if p.default is Kind.empty and p.kind not in many),
            next(iter(named(Kind.VAR_POSITIONAL)), None),
            named(Kind.KEYWORD_ONLY),
            bool(named(Kind.VAR_KEYWORD)),
        )

    @property
    def count(self) -> int | None:
        """How many arguments can be positional; None for any number."""
        return None if self.positional is None or self.rest is not None else len(self.positional)

    def choose(self, argnums: int | Iterable[int], argnames: str | Iterable[str]) -> ChosenParameters:
        """Parameters by position and by name: each implies the other, as in `jax.jit`."""
        nums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
        names = {argnames} if isinstance(argnames, str) else set(argnames)
        if self.positional is None:
            return ChosenParameters(nums, frozenset(names))
        if self.count is not None:
            nums = tuple(i + self.count if i < 0 else i for i in nums)
        named = {self.positional[i] for i in nums if self.positional_only <= i < len(self.positional)}
        at = [i for i, k in enumerate(self.positional) if k in names]
        return ChosenParameters(tuple(dict.fromkeys((*nums, *at))), frozenset(names | named))

    def take(self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> Call:
        """Binds a call."""
        if kwargs:
            args, kwargs = self.by_position(args, kwargs)
        if not self.static.argnums and not self.static.argnames:
            return Call(args, kwargs, frozenset(), (), *jax.tree.flatten((args, dict(kwargs))))
        static = self.static.positions(len(args))
        names = tuple(k for k in sorted(kwargs) if k in self.static.argnames)
        dynamic = tuple(a for i, a in enumerate(args) if i not in static)
        rest = {k: v for k, v in kwargs.items() if k not in names}
        return Call(args, kwargs, static, names, *jax.tree.flatten((dynamic, rest)))

    def by_position(
        self, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
    ) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The same call with keywords at their positions, up to the first parameter that is left out.

        >>> Parameters.of(lambda a, b, c=0, d=1: a).by_position((1,), {"d": 4, "b": 2})
        ((1, 2), {'d': 4})
        """
        left = dict(kwargs)
        moved = list(args)
        for name in (self.positional or ())[max(len(args), self.positional_only) :]:
            if len(moved) < self.positional_only or name not in left:
                break
            moved.append(left.pop(name))
        return tuple(moved), left

    def check(self, call: Call) -> Iterator[Problem]:
        """The problems of a call: arguments that are missing, given twice, or unknown."""
        if self.positional is None:
            return
        here = self.positional[: len(call.args)]
        takes = f"{self.name}({', '.join(self.texts())})"
        for name in self.required_names:
            if name not in here and name not in call.kwargs:
                why = f"{takes}: {name} has no default"
                yield Problem("argument", name, "nothing", "an argument", why, f"{name}=...")
        if self.count is not None and len(call.args) > self.count:
            yield Problem(
                "argument",
                f"{self.name}(...)",
                f"{len(call.args)} positional arguments",
                f"at most {self.count}",
                takes,
                "leave the others out, or give them by keyword",
            )
        for name in call.kwargs:
            if name in here[self.positional_only :] or (name in here and not self.any_keyword):
                why, fix = f"it stands at position {here.index(name)} as well", "leave one of the two out"
                yield Problem("argument", name, "an argument that is given twice", "one of them", why, fix)
            elif not self.any_keyword and name not in (
                *self.positional[self.positional_only :],
                *self.others,
            ):
                near = get_close_matches(name, (*self.positional, *self.others), 1)
                fix = f"did you mean {near[0]}=...?" if near else "leave it out"
                legal = ", ".join((*self.positional[self.positional_only :], *self.others)) or "none"
                yield Problem("argument", f"{self.name}({name}=...)", f"{name!r}", legal, takes, fix)

    def texts(self) -> list[str]:
        """The parameters as text."""
        optional = {*(self.positional or ()), *self.others} - {*self.required_names}
        names = [
            *(f"{k}=..." if k in optional else k for k in self.positional or ()),
            *([f"*{self.rest or ''}"] if self.rest is not None or self.others else []),
        ]
        return [*names, *(f"{k}=..." if k in optional else k for k in self.others)]


def parameters(
    fn: Callable[..., object],
    donate_argnums: int | Iterable[int],
    donate_argnames: str | Iterable[str],
    static_argnums: int | Iterable[int],
    static_argnames: str | Iterable[str],
) -> tuple[Parameters, list[Problem]]:
    """The parameters of a function for `compile`, and the problems."""
    own = Parameters.of(fn)
    donate, static = own.choose(donate_argnums, donate_argnames), own.choose(static_argnums, static_argnames)
    wrong = [
        *_no_position(own, donate_argnums, "donate_argnums"),
        *_no_position(own, static_argnums, "static_argnums"),
        *_no_name(own, donate_argnames, "donate_argnames"),
        *_no_name(own, static_argnames, "static_argnames"),
    ]
    by_number = sorted({*donate.argnums} & {*static.argnums})
    known = {k for i, k in enumerate(own.positional or ()) if i in by_number}
    wrong += [_in_both(f"position {i}", str(i), "argnums") for i in by_number]
    by_name = sorted({*donate.argnames} & {*static.argnames} - known)
    wrong += [_in_both(repr(k), repr(k), "argnames") for k in by_name]
    return replace(own, static=static, donate=donate), wrong


def _no_position(own: Parameters, argnums: int | Iterable[int], name: str) -> Iterator[Problem]:
    n = own.count
    for i in (argnums,) if isinstance(argnums, int) else tuple(argnums):
        if n is not None and not -n <= i < n:
            yield Problem(
                "argument",
                f"compile(..., {name}={argnums!r})",
                f"position {i}",
                f"{-n}..{n - 1}" if n else "none",
                f"{own.name} takes {n} positional argument{'s' * (n != 1)}",
                "count positions from 0",
            )


def _no_name(own: Parameters, argnames: str | Iterable[str], name: str) -> Iterator[Problem]:
    legal = (*(own.positional or ())[own.positional_only :], *own.others)
    for k in (argnames,) if isinstance(argnames, str) else tuple(argnames):
        if not own.any_keyword and k not in legal:
            near = get_close_matches(k, legal, 1)
            yield Problem(
                "argument",
                f"compile(..., {name}={argnames!r})",
                repr(k),
                ", ".join(map(repr, legal)) or "none",
                f"{own.name} has no parameter of that name",
                f"did you mean {near[0]!r}?" if near else "leave it out",
            )


def _in_both(got: str, what: str, how: str) -> Problem:
    return Problem(
        "argument",
        f"compile(..., static_{how}=..., donate_{how}=...)",
        f"{got} in both",
        "each position in one of them" if how == "argnums" else "each name in one of them",
        "a static argument is a Python value: it has no memory to donate",
        f"leave {what} out of donate_{how}",
    )
