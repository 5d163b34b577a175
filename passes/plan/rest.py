"""How arguments and results may lie at rest, as `jax.Array`s arrive and leave."""

from collections.abc import Sequence

from sbp.compat import core
from sbp.compat.untyped import DType
from sbp.layout import every_signature, is_even
from sbp.placement import Placement
from sbp.signature import AUTO_SPLIT, B, NdSbp, Signature, Split


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
