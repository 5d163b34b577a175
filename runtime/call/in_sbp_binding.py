"""Binds `in_sbp` to the arguments of a call: by position or by name."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import jax

from sbp.compat.untyped import Prefix, PyTree
from sbp.errors import Problem
from sbp.notation.resolve import is_leaf, resolve, scalar_notes
from sbp.placement import Placement
from sbp.runtime.call.binding import Call, Parameters
from sbp.signature import AUTO, NdSbp


@dataclass(frozen=True)
class InSbpBinding:
    """`in_sbp`, bound to the arguments of one call.

    Arguments:
      args: a prefix of the positional arguments that are not static.
      kwargs: a prefix for each keyword argument.
      names: of the positional arguments, if `in_sbp` is a dict by name; () if it goes by position.
      problems: why it could not be bound.
    """

    args: Prefix
    kwargs: Mapping[str, Prefix]
    names: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def parts(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[tuple[Prefix, PyTree]]:
        """Prefixes with the trees that they belong to, in the order of the leaves of the call."""
        if not self.names:
            return [(self.args, tuple(args)), (dict(self.kwargs), dict(kwargs))]
        ordered = [
            *zip(self.names, self.args, args, strict=True),
            *((k, self.kwargs[k], kwargs[k]) for k in sorted(kwargs)),
        ]
        trees = OrderedDict((k, tree) for k, _, tree in ordered)
        return [(OrderedDict((k, prefix) for k, prefix, _ in ordered), trees)]

    def resolve(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], paths: Sequence[str], placement: Placement
    ) -> tuple[list[NdSbp | None], list[Problem]]:
        """One signature (None: AUTO) per argument leaf, and the problems.

        Arguments:
          args, kwargs: trees of arrays or `ShapeDtypeStruct`s.
          paths: a name per leaf.
        """
        out: list[NdSbp | None] = []
        problems = list(self.problems)
        for prefix, tree in self.parts(args, kwargs):
            n = len(jax.tree.leaves(tree))
            found, wrong = resolve(prefix, tree, paths[len(out) : len(out) + n], placement, "in_sbp")
            out, problems = [*out, *found], [*problems, *wrong]
        return out, problems

    def notes(self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], paths: Sequence[str]) -> list[str]:
        """Remarks on signatures of scalars, which have no dims to split; arguments as in `resolve`."""
        out: list[str] = []
        start = 0
        for prefix, tree in self.parts(args, kwargs):
            n = len(jax.tree.leaves(tree))
            out += scalar_notes(prefix, tree, paths[start : start + n], "in_sbp")
            start += n
        return out

    def misread(
        self, args: Sequence[PyTree], kwargs: Mapping[str, PyTree], paths: Sequence[str], placement: Placement
    ) -> list[Problem]:
        """The problems with signatures of a function that could not be traced and may have stages."""
        whole = [placement, *(placement.split(a)[0] for a in range(placement.ndim) if placement.ndim > 1)]
        return min((self.resolve(args, kwargs, paths, p)[1] for p in whole), key=len)


def bind_in_sbp(in_sbp: Prefix, call: Call, own: Parameters) -> InSbpBinding:
    """Binds `in_sbp` to the arguments of a call: by position, or by name if it is a dict.

    Arguments:
      own: the parameters of the function. A parameter that is passed by keyword keeps its entry.
    """
    names = own.positional or ()
    keywords = [k for k in call.kwargs if k not in call.static_names]
    if type(in_sbp) is dict:
        return _by_name(in_sbp, call, own, keywords)
    if type(in_sbp) not in (list, tuple) or is_leaf(in_sbp):
        one = in_sbp if is_leaf(in_sbp) else AUTO
        return InSbpBinding(in_sbp, {k: one if k in names else AUTO for k in keywords})
    if any(isinstance(x, str | type) for x in in_sbp):  # no entries: a signature that is misspelt
        return InSbpBinding(in_sbp, dict.fromkeys(keywords, AUTO))
    count = max(len(names), len(call.args))
    dynamic = [i for i in range(count) if i not in own.static.positions(count)]
    wanted = [*call.at, *(names.index(k) for k in keywords if k in names)]
    least = 1 + max((dynamic.index(i) for i in wanted if i in dynamic), default=-1)
    most = len(dynamic) if own.rest is None and own.positional is not None else least
    entries = dict(zip(dynamic, in_sbp, strict=False))
    if not least <= len(in_sbp) <= max(least, most):
        problems: tuple[Problem, ...] = (_other_number(in_sbp, call, own, dynamic, least, most),)
        return InSbpBinding(AUTO, dict.fromkeys(keywords, AUTO), problems=problems)
    return InSbpBinding(
        tuple(entries[i] for i in call.at),
        {k: entries[names.index(k)] if k in names else AUTO for k in keywords},
    )


def _by_name(
    in_sbp: Mapping[str, Prefix], call: Call, own: Parameters, keywords: Sequence[str]
) -> InSbpBinding:
    """Binds by the names of the parameters; a parameter without a name is AUTO."""
    names = own.positional or ()
    known = {*names, *own.others, *keywords}
    static = {names[i] for i in own.static.argnums if i < len(names)} | own.static.argnames
    problems = tuple(
        _no_parameter(name, [k for k in (*names, *own.others) if k not in static], name in static, own)
        for name in in_sbp
        if name in static or (name not in known and not own.any_keyword)
    )
    labels = tuple(names[i] if i < len(names) else f"{own.rest or 'args'}[{i}]" for i in call.at)
    return InSbpBinding(
        tuple(in_sbp.get(k, AUTO) for k in labels),
        {k: in_sbp.get(k, AUTO) for k in keywords},
        labels,
        problems,
    )


def _no_parameter(name: object, legal: Sequence[str], static: bool, own: Parameters) -> Problem:
    why = f"{own.name} has no parameter of that name"
    near = get_close_matches(str(name), legal, 1)
    inside = f"in_sbp=({{{name!r}: ...}},) for an argument that is a dict"
    return Problem(
        "signature",
        f"in_sbp[{name!r}]",
        "an entry for a static argument" if static else repr(name),
        f"{', '.join(map(repr, legal)) or 'none'}: a dict goes by the names of parameters",
        "a static argument is a Python value and has no signature" if static else why,
        f"did you mean {near[0]!r}?" if near else inside,
    )


def _other_number(
    in_sbp: Sequence[Prefix], call: Call, own: Parameters, dynamic: Sequence[int], least: int, most: int
) -> Problem:
    """The problem of a sequence with too few or too many entries."""
    names, n = own.positional or (), len(in_sbp)
    listed = [names[i] if i < len(names) else f"{own.rest or 'args'}[{i}]" for i in dynamic]
    bare = listed[n:least]
    others = [k for k in call.kwargs if k not in names and k not in call.static_names]
    why = f"{own.name} takes {', '.join(listed)}" if listed else f"{own.name} takes none by position"
    if bare:
        why += f": {', '.join(bare)} {'has' if len(bare) == 1 else 'have'} no entry"
    fix = "sbp.AUTO (or None) for an argument leaves it open"
    if others and n > most:
        fix = f"in_sbp={{{others[0]!r}: ...}}: a dict goes by name, and {others[0]} has no position"
    legal = str(least) if most <= least else f"{least}..{most}"
    return Problem(
        "signature",
        "in_sbp",
        f"{n} entr{'y' if n == 1 else 'ies'}",
        f"{legal}: one per positional argument that is not static",
        why,
        fix,
    )
