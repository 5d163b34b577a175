"""Effects, what a program does beside computing its results: refs made inside become values, the rest is
known or refused."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from sbp.compat import core, ops
from sbp.compat.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var
from sbp.errors import Problem, raise_all
from sbp.passes.program.graph import Source

OWN_REFS = "InternalMutableArrayEffect"
"""The effect, by its class, of refs that the function makes itself."""

KNOWN = {
    OWN_REFS: "discharged: its reads and writes become values",
    "DebugEffect": "debug callbacks run once, on the first device",
    "OrderedDebugEffect": "refused where the placement is known, unless it is one device",
    "IOEffect": "refused where the placement is known",
    "OrderedIOEffect": "refused where the placement is known",
    "NoDCEEffect": "keeps an op that nobody uses: it changes no number",
}
"""The effects that programs may have, by the names of their classes, and what becomes of them."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a program with an effect is not taken.

    Arguments:
      got, legal, why, fix: as of a `Problem`.
    """

    got: str
    legal: str
    why: str
    fix: str


OUTER_REF = Refusal(
    "a ref that was made outside the function",
    "refs made inside: jax.new_ref(...) in the function",
    "a ref is one buffer that is changed in place: here it would have to change on every device at once",
    "pass its value r[...] as an argument, return the new one, and write it back after the call",
)
REFUSED = {
    "ErrorEffect": Refusal(
        "a checkify.check outside of checkify.checkify",
        "checks under checkify.checkify",
        "the check would be dropped: jit refuses it too",
        "checkify.checkify(fn), whose error is a result like any other",
    ),
    "FfiEffect": Refusal(
        "a foreign call with side effects",
        "foreign calls that only compute: has_side_effect=False",
        "it would run once per device, and not at all if its results are not used",
        "has_side_effect=False, or the call outside the program",
    ),
    "BufferCallbackEffect": Refusal(
        "a buffer callback with side effects",
        "buffer callbacks that only compute: has_side_effect=False",
        "it would run once per device, and not at all if its results are not used",
        "has_side_effect=False, or jax.debug.callback, which runs once",
    ),
}
"""The effects that are refused for a reason of their own."""


def refuse(where: str, reason: Refusal, kind: str = "annotation") -> Problem:
    """The problem of an effect at a place, or of an argument that brings it."""
    return Problem(kind, where, reason.got, reason.legal, reason.why, reason.fix)


def unknown(effect: str) -> Refusal:
    """Of an effect that is in no table."""
    return Refusal(
        f"an op with the effect {effect}",
        "ops that only compute, refs made inside the function, jax.debug.callback",
        "this effect is not known, so running it on several devices may be wrong",
        "the op outside the program; its results as arguments",
    )


def without_effects(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The closed jaxpr of a function without the refs that it makes: their reads and writes are values.

    Raises:
      AnnotationError: for refs of somebody else's, and effects that are not known; all of them at once.
    """
    raise_all([*_outer_refs(closed), *_unknown_effects(closed.jaxpr)])
    if OWN_REFS not in _names(closed.jaxpr):
        return closed
    try:
        return ops.discharge(closed)
    except NotImplementedError as e:
        where = _where(closed.jaxpr, partial(_has, OWN_REFS))
        reason = Refusal(
            "a ref where it cannot be turned into values",
            "reads, writes and sums of refs, in loops, branches and calls",
            str(e).splitlines()[0],
            "carry the value instead of the ref",
        )
        raise_all([refuse(where, reason)])
        raise


def _names(x: Jaxpr | JaxprEqn) -> set[str]:
    """The effects of a jaxpr or of an equation, by the names of their classes."""
    return {type(e).__name__ for e in x.effects}


def _has(effect: str, eqn: JaxprEqn) -> bool:
    return effect in _names(eqn)


def _takes(var: Var, eqn: JaxprEqn) -> bool:
    return any(v is var for v in eqn.invars)


def _outer_refs(closed: ClosedJaxpr) -> Iterator[Problem]:
    for var, held in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if isinstance(held, jax.Ref):
            where = _where(closed.jaxpr, partial(_takes, var))
            yield refuse(f"{where}: {jax.typeof(held).str_short()}", OUTER_REF)


def _unknown_effects(jaxpr: Jaxpr) -> Iterator[Problem]:
    """One problem per kind of effect; those of refs of somebody else's are told apart by the refs."""
    for name in sorted(_names(jaxpr) - set(KNOWN) - {"ReadEffect", "WriteEffect", "AccumEffect"}):
        where = _where(jaxpr, partial(_has, name))
        yield refuse(where, REFUSED.get(name) or unknown(name))


def _where(jaxpr: Jaxpr, holds: Callable[[JaxprEqn], bool]) -> str:
    """The innermost op for which something holds, and its line."""
    found = next((eqn for eqn in jaxpr.eqns if holds(eqn)), None)
    if found is None:
        return "the function"
    for inner in _inside(found.params.values()):
        if any(holds(eqn) for eqn in inner.eqns):
            return _where(inner, holds)
    line = core.user_line(found.source_info) or core.any_line(found.source_info)
    return f"{found.primitive.name} at {Source(*line)}" if line else str(found.primitive.name)


def _inside(params: Iterable[Any]) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for x in params:
        held: Iterable[Any] = x if isinstance(x, tuple | list) else (x,)
        for j in held:
            inner = getattr(j, "jaxpr", j)
            if hasattr(inner, "eqns"):
                yield inner
