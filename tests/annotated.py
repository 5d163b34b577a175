"""What is said of arguments, said inside too: where a split does not divide, it is kept only there."""

from collections.abc import Callable
from typing import Any

import jax

from sbp.annotation import annotate
from sbp.notation.resolve import resolve
from sbp.placement import Placement


def annotated(fn: Callable[..., Any], on: Placement, in_sbp: Any) -> Callable[..., Any]:
    """The function with its arguments annotated by the signatures that they are given."""

    def inside(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        found, _ = resolve(in_sbp, args, [""] * len(leaves), on, "in_sbp")
        pairs = zip(leaves, found, strict=True)
        return fn(*jax.tree.unflatten(tree, [x if nd is None else annotate(x, nd) for x, nd in pairs]))

    return inside
