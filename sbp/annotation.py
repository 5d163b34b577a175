"""`annotate` and `on`: what a model says inside itself."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias
from urllib.parse import quote, unquote

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from sbp.compat import core
from sbp.errors import Problem, SignatureError
from sbp.notation.named_axes import Levels, NamedSignature, named_signature
from sbp.notation.suggestions import suggestion
from sbp.placement import Placement, as_placement
from sbp.signature import AUTO_SPLIT, NdSbp, Signature, Split, format_sbp, is_signature, normalise

Tangent: TypeAlias = jax.Array | core.Zero
"""The derivative of a tensor; where it is known to be zero, JAX does not make it."""

Annotation: TypeAlias = Signature | Sequence[Signature] | PartitionSpec | NamedSharding
"""What an annotation may be."""

OWN = "annotate"
"""What says something in our own words, and not in JAX's."""

SCOPE = "sbp.on:"
MICROBATCH = "sbp.microbatch"
_ON = re.compile(re.escape(SCOPE) + r"([\w-]+)\[([\d,]+)\]([\dx]+)\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Pin:
    """What an annotation says of its tensor: a signature (None: any) on a placement (None: the program's).

    Arguments:
      grad: the signature of the cotangent, likewise.
      named_signature, named_grad: the same two by the names of axes, until a placement is planned for.
      levels: of what was named, where it says nothing of some axes.
      words: who says it: a function's name.
    """

    nd: NdSbp | None
    placement: Placement | None
    grad: NdSbp | None
    named_signature: NamedSignature | None = None
    named_grad: NamedSignature | None = None
    levels: Levels = ()
    words: str = OWN

    def at(self, dim: int) -> Pin:
        """The same once `vmap` has put a dim at a position."""
        return replace(
            self,
            nd=_batched(self.nd, dim),
            grad=_batched(self.grad, dim),
            named_signature=self.named_signature and self.named_signature.at(dim),
            named_grad=self.named_grad and self.named_grad.at(dim),
        )

    @property
    def of_cotangent(self) -> Pin:
        """What it says of the cotangent."""
        return Pin(self.grad, self.placement, None, self.named_grad)


def _batched(nd: NdSbp | None, at: int) -> NdSbp | None:
    if nd is None:
        return None
    return tuple(Split(s.dim + 1) if isinstance(s, Split) and s.dim >= at else s for s in nd)


def _batch(args: Sequence[jax.Array], dims: Sequence[int], *, pin: Pin) -> tuple[jax.Array, int]:
    (x,), (d,) = args, dims
    return annotate_p.bind(x, pin=pin.at(d)), d


def _jvp(primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, pin: Pin) -> tuple[jax.Array, Tangent]:
    (x,), (t,) = primals, tangents
    out = annotate_p.bind(x, pin=pin)
    return out, t if type(t) is core.Zero else cotangent_p.bind(t, pin=pin)


def _transpose(ct: Tangent, x: object, *, pin: Pin) -> list[Tangent]:
    if type(ct) is core.Zero or (pin.grad is None and pin.named_grad is None):
        return [ct]
    return [annotate_p.bind(ct, pin=pin.of_cotangent)]


def _tangent_jvp(
    primals: Sequence[jax.Array], tangents: Sequence[Tangent], *, pin: Pin
) -> tuple[jax.Array, Tangent]:
    (x,), (t,) = primals, tangents
    return cotangent_p.bind(x, pin=pin), t if type(t) is core.Zero else cotangent_p.bind(t, pin=pin)


def _tangent_batch(args: Sequence[jax.Array], dims: Sequence[int], *, pin: Pin) -> tuple[jax.Array, int]:
    (x,), (d,) = args, dims
    return cotangent_p.bind(x, pin=pin.at(d)), d


annotate_p = core.make_primitive("sbp_annotate", jvp=_jvp, transpose=None, batch=_batch)
# The tangent of an annotated tensor: free in forward mode; its transpose pins the cotangent.
cotangent_p = core.make_primitive(
    "sbp_cotangent", jvp=_tangent_jvp, transpose=_transpose, batch=_tangent_batch
)


def annotate(
    x: ArrayLike,
    signature: Annotation,
    *,
    placement: Placement | jax.sharding.Mesh | None = None,
    grad: Annotation | None = None,
) -> jax.Array:
    """Fixes the signature of a tensor inside a model; on one device it is the identity.

    Arguments:
      x: an array.
      signature: one `S(dim)`, `B` or `P` per placement axis (a bare one for a 1-D placement); or a
        `PartitionSpec` or `NamedSharding`, whose `unreduced` axes are those of `P`.
      placement: the devices of the tensor, a placement or a `Mesh`; None for the program's placement.
      grad: the signature of its gradient, in the same form; None lets the planner choose.

    Raises:
      SignatureError: for something that is not a signature, or a split of a dim that does not exist.
      PlacementError: for something that is not a placement.

    >>> import jax.numpy as jnp
    >>> from sbp.signature import B, S
    >>> annotate(jnp.ones((4, 2)), [S(0), B]).shape
    (4, 2)
    """
    x = jax.numpy.asarray(x)
    there = None if placement is None else as_placement(placement, "annotate(..., placement=...)")
    nd, named = _read(x, signature, "signature")
    own_grad, named_grad = (None, None) if grad is None else _read(x, grad, "grad")
    annotated: jax.Array = annotate_p.bind(x, pin=Pin(nd, there, own_grad, named, named_grad))
    return annotated


def _read(x: jax.Array, signature: Annotation, name: str) -> tuple[NdSbp, None] | tuple[None, NamedSignature]:
    """The argument as an N-D signature of `x`, checked, or as one by the names of axes."""
    if isinstance(signature, PartitionSpec | NamedSharding):
        return None, named_signature(signature, x.ndim)
    nd: Sequence[Signature] = (signature,) if isinstance(signature, Signature) else signature
    is_open = isinstance(nd, list | tuple) and AUTO_SPLIT in nd
    if is_open or not isinstance(nd, list | tuple) or not nd or not all(map(is_signature, nd)):
        why, fix = suggestion(signature) or ("an annotation is an N-D signature", "annotate(x, [S(0), B])")
        if is_open:
            why, fix = (
                "S(AUTO) is of an argument or a result, in in_sbp or out_sbp",
                "S(dim), or no annotation",
            )
        raise SignatureError(
            Problem(
                "signature",
                f"annotate(x: {x.dtype}{list(x.shape)}, {name}=...)",
                repr(signature),
                "S(dim), B or P, or a list of them, one per placement axis; or a PartitionSpec",
                why,
                fix,
            )
        )
    out = normalise(nd, x.ndim)
    for s in out:
        if isinstance(s, Split) and not 0 <= s.dim < x.ndim:
            raise SignatureError(
                Problem(
                    "signature",
                    f"annotate(x: {x.dtype}{list(x.shape)}, {name}=...)",
                    format_sbp(nd),
                    f"dims {-x.ndim}..{x.ndim - 1}" if x.ndim else "B (a scalar has no dims)",
                    f"{s} splits a dim that a tensor of {x.ndim} dims does not have",
                    "count dims from 0",
                )
            )
    return out, None


@contextlib.contextmanager
def on(placement: Placement | jax.sharding.Mesh) -> Iterator[None]:
    """A context: ops traced inside run on `placement` (or on the devices of a `Mesh`); so do their backward
    ops.

    Raises:
      PlacementError: for something that is not a placement.

    >>> from sbp.placement import placement as make
    >>> with on(make("cpu", shape=(2,))):
    ...     pass
    """
    with jax.named_scope(scope_of(as_placement(placement, "sbp.on(...)"))):
        yield


def scope_of(placement: Placement) -> str:
    """The name scope of the ops of a placement.

    >>> from sbp.placement import placement as make
    >>> scope_of(make("cpu", [4, 5], axes=("data",)))
    'sbp.on:cpu[4,5]2[data]'
    >>> print(scope_of(make("cpu", [4, 5], axes="d", axis_types=jax.sharding.AxisType.Auto)))
    sbp.on:cpu[4,5]2[d:Auto]
    """
    ranks = ",".join(map(str, placement.ranks))
    shape = "x".join(map(str, placement.shape))
    names = [quote(a, safe="") for a in placement.axes]
    if placement.axis_types:
        names = [f"{a}:{t}" for a, t in zip(names, placement.axis_types, strict=True)]
    axes = ",".join(names)
    return f"{SCOPE}{placement.kind}[{ranks}]{shape}[{axes}]"


def placement_in(scope: str) -> Placement | None:
    """The placement of the innermost `on` in a name scope, as JAX hands it through its transformations.

    >>> print(placement_in("transpose(jvp(sbp.on:cpu[4,5]2[data]))/layer"))
    cpu(data=2, ranks [4, 5])
    """
    found = _ON.findall(scope)
    if not found:
        return None
    kind, ranks, shape, axes = found[-1]
    sizes = tuple(map(int, shape.split("x")))
    names, types = zip(*(a.partition(":")[::2] for a in axes.split(",")), strict=True)
    own = types if all(types) else ()
    return Placement(kind, tuple(map(int, ranks.split(","))), sizes, tuple(map(unquote, names)), own)
