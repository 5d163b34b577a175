"""What the choice of signatures is asked about a function."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import sbp
from sbp.passes import chain
from sbp.passes.boxing.links import Network
from sbp.passes.boxing.paths import Boxings
from sbp.passes.recall import Recall


def asked(
    fn: Callable[..., Any],
    placement: sbp.Placement,
    *args: Any,
    options: sbp.Options | None = None,
    donate: Sequence[int] = (),
    **terms: Any,
) -> Recall:
    """The choice of a call's signatures, as the pass "choice" is asked for it; `terms` replace its own."""
    program: Any = sbp.compile(fn, placement, options=options, donate_argnums=donate)
    program.plan(*args)
    (built,) = program._built.values()
    request = replace(built.request, terms=replace(built.request.terms, **terms))
    at: Any = chain.Logical(request, built.traced, Boxings(Network(placement, request.hardware)))
    for p in chain.PLACEMENT.passes:
        at = p.run(at)
        if p.name == "choice":
            break
    found: Recall = at.recall
    return found
