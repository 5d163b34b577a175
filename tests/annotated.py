"""What is said of arguments, said inside too: where a split does not divide, it is kept only there."""

from collections.abc import Callable
from typing import Any

import jax

from sbp.annotation import annotate
from sbp.layout import at_rest
from sbp.notation.resolve import resolve
from sbp.placement import Placement


def annotated(fn: Callable[..., Any], on: Placement, in_sbp: Any) -> Callable[..., Any]:
    """The function with those arguments annotated that cannot lie by the signatures that they are given."""

    def inside(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        found, _ = resolve(in_sbp, args, [""] * len(leaves), on, "in_sbp")
        kept = [
            x if nd is None or at_rest(x.shape, nd, on.shape) == nd else annotate(x, nd)
            for x, nd in zip(leaves, found, strict=True)
        ]
        return fn(*jax.tree.unflatten(tree, kept))

    return inside
