"""The arithmetic of a signature: local shapes, offsets and valid lengths, uneven sizes included.

A split cuts a dim of size n over a group of g into chunks of ceil(n / g), outer axis first; the last
shards may be shorter or empty and are padded to the chunk. What is in the padding is unspecified. The
valid part of a shard is always a prefix.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.placement import Placement
from sbp.signature import AUTO_SPLIT, B, NdSbp, Partial, Signature, Split, splits_of


def chunk(size: int, group: int) -> int:
    """The padded size of one shard.

    >>> chunk(257, 8)
    33
    """
    return -(-size // group)


def split_shape(shape: Sequence[int], signature: Signature, group: int) -> tuple[int, ...]:
    """The shape that remains on one device after one axis of size `group`.

    >>> split_shape((10, 4), Split(0), 4)
    (3, 4)
    """
    if not isinstance(signature, Split):
        return tuple(shape)
    return tuple(chunk(n, group) if d == signature.dim else n for d, n in enumerate(shape))


def local_shape(shape: Sequence[int], nd: Sequence[Signature], hierarchy: Sequence[int]) -> tuple[int, ...]:
    """The padded shape of one device's shard.

    >>> local_shape((10, 4), (Split(0), Split(0)), (2, 4))
    (2, 4)
    """
    out = list(shape)
    # Asked for hundreds of thousands of times.
    for signature, group in zip(nd, hierarchy, strict=True):
        if signature.__class__ is Split and 0 <= signature.dim < len(out):
            out[signature.dim] = -(-out[signature.dim] // group)
    return tuple(out)


def wide_axes(hierarchy: Sequence[int]) -> tuple[int, ...]:
    """The axes with more than one device: along others a tensor can lie in one way only.

    >>> wide_axes((2, 1, 4))
    (0, 2)
    """
    return tuple(a for a, n in enumerate(hierarchy) if n > 1)


def on_wide_axes(nd: Sequence[Signature], hierarchy: Sequence[int]) -> NdSbp:
    """The same layout with B along axes of one device, where every signature means that.

    >>> on_wide_axes((Split(0), Split(1)), (1, 4))
    (B, S(1))
    """
    return tuple(s if n > 1 else B for s, n in zip(nd, hierarchy, strict=True))


def every_signature(one_d: Sequence[Signature], hierarchy: Sequence[int]) -> Iterator[NdSbp]:
    """Every N-D signature made of some 1-D ones, in their order; B along axes of one device.

    >>> list(every_signature((B, Split(0)), (1, 4)))
    [(B, B), (B, S(0))]
    """
    return itertools.product(*(tuple(one_d) if n > 1 else (B,) for n in hierarchy))


def chunk_sizes(size: int, axes: Sequence[int], hierarchy: Sequence[int]) -> tuple[int, ...]:
    """The size that remains after each of `axes`, outer to inner.

    >>> chunk_sizes(10, (0, 1), (2, 4))
    (5, 2)
    """
    out = []
    for axis in axes:
        size = chunk(size, hierarchy[axis])
        out.append(size)
    return tuple(out)


def is_even(shape: Sequence[int], nd: Sequence[Signature], hierarchy: Sequence[int]) -> bool:
    """Whether every split divides, so that no shard has padding and JAX's NamedSharding can hold it."""
    rest = list(shape)
    for signature, group in zip(nd, hierarchy, strict=True):
        if isinstance(signature, Split):
            if rest[signature.dim] % group:
                return False
            rest[signature.dim] //= group
    return True


def at_rest(shape: Sequence[int], nd: Sequence[Signature], hierarchy: Sequence[int]) -> NdSbp:
    """The nearest signature that a `jax.Array` can have: splits that do not divide, and P, become B.

    >>> at_rest((257, 8), (Split(0), Split(1)), (2, 4))
    (B, S(1))
    """
    rest, out = list(shape), list[Signature]()
    for signature, group in zip(nd, hierarchy, strict=True):
        keep = isinstance(signature, Split) and rest[signature.dim] % group == 0
        if keep and isinstance(signature, Split):
            rest[signature.dim] //= group
        out.append(signature if keep else B)
    return tuple(out)


def rest_signatures(shape: Sequence[int], dtype: DType, placement: Placement) -> tuple[NdSbp, ...]:
    """Signatures that a `jax.Array` of this shape can have on the placement: no P, no padding."""
    one_d: list[Signature] = [B]
    if not core.is_key(dtype):
        one_d += [Split(d) for d, n in enumerate(shape) if n > 1]
    every = every_signature(one_d, placement.shape)
    return tuple(nd for nd in every if is_even(shape, nd, placement.shape))


def allowed_at_rest(
    asked: NdSbp | None, shape: Sequence[int], dtype: DType, placement: Placement
) -> tuple[NdSbp, ...]:
    """The signatures that an argument or a result may have at rest.

    Arguments:
      asked: a signature that it can have at rest, in which `S(AUTO)` is any split; where no dim divides it is
        B. None for all.

    >>> import numpy as np
    >>> from sbp.placement import placement
    >>> allowed_at_rest((AUTO_SPLIT,), (6, 8), np.float32, placement("cpu", shape=(4,)))
    ((S(1),),)
    >>> allowed_at_rest((AUTO_SPLIT,), (6, 3), np.float32, placement("cpu", shape=(4,)))
    ((B,),)
    """
    if asked is not None and AUTO_SPLIT not in asked:
        return (asked,)
    free = rest_signatures(shape, dtype, placement)
    if asked is None:
        return free
    whole = {
        nd: sum(w == AUTO_SPLIT and s == B for w, s in zip(asked, nd, strict=True))
        for nd in free
        if all(w in (s, AUTO_SPLIT) for w, s in zip(asked, nd, strict=True))
    }
    return tuple(nd for nd, n in whole.items() if n == min(whole.values()))


def valid_length(size: int, axes: Sequence[int], hierarchy: Sequence[int], coords: Sequence[int]) -> int:
    """How many rows of a shard are real, on the device at `coords`.

    >>> [valid_length(10, (0,), (4,), (i,)) for i in range(4)]
    [3, 3, 3, 1]
    >>> [valid_length(5, (0, 1), (2, 2), c) for c in ((0, 0), (0, 1), (1, 0), (1, 1))]
    [2, 1, 2, 0]
    """
    rows = size
    for axis, c in zip(axes, chunk_sizes(size, axes, hierarchy), strict=True):
        rows = min(max(rows - coords[axis] * c, 0), c)
    return rows


def offset(size: int, axes: Sequence[int], hierarchy: Sequence[int], coords: Sequence[int]) -> int:
    """The logical position of the first row of a shard, on the device at `coords`."""
    return sum(coords[axis] * c for axis, c in zip(axes, chunk_sizes(size, axes, hierarchy), strict=True))


def is_padded(size: int, axes: Sequence[int], hierarchy: Sequence[int]) -> bool:
    """Whether some shard of a dim split by `axes` has padding."""
    for axis in axes:
        if size % hierarchy[axis]:
            return True
        size //= hierarchy[axis]
    return False


@dataclass(frozen=True, slots=True)
class Layout:
    """A logical shape together with its N-D signature and the hierarchy that it lies on.

    >>> Layout((10, 4), (Split(0), Partial()), (4, 2)).local
    (3, 4)
    """

    shape: tuple[int, ...]
    nd: NdSbp
    hierarchy: tuple[int, ...]

    @property
    def local(self) -> tuple[int, ...]:
        """The padded shape of one shard."""
        return local_shape(self.shape, self.nd, self.hierarchy)

    def axes(self, dim: int) -> tuple[int, ...]:
        """The placement axes that split `dim`, outer to inner."""
        return splits_of(self.nd, dim)

    def has_padding(self, dim: int) -> bool:
        """Whether some shard has padding along `dim`."""
        return is_padded(self.shape[dim], self.axes(dim), self.hierarchy)

    def partial_axes(self, op: str) -> tuple[int, ...]:
        """The placement axes along which the value is P(op)."""
        return tuple(a for a, s in enumerate(self.nd) if s == Partial(op))
