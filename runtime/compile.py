"""`compile`. To import it is cheap: what traces, plans and runs is loaded when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import jax

from sbp.errors import raise_all
from sbp.options import Options
from sbp.passes.explain.fault import public
from sbp.placement import Placement
from sbp.signature import AUTO
from sbp.untyped import Prefix

if TYPE_CHECKING:
    from sbp.runtime.execute import Program

P = ParamSpec("P")
R = TypeVar("R")


@public
def compile(
    fn: Callable[P, R],
    placement: Placement | jax.sharding.Mesh,
    *,
    in_sbp: Prefix = AUTO,
    out_sbp: Prefix = AUTO,
    donate_argnums: int | Iterable[int] = (),
    donate_argnames: str | Iterable[str] = (),
    static_argnums: int | Iterable[int] = (),
    static_argnames: str | Iterable[str] = (),
    options: Options | None = None,
) -> Program[P, R]:
    """Makes a distributed program of a single-device JAX function.

    Arguments:
      fn: any JAX function over pytrees: a model, its loss, a whole train step.
      placement: the devices: an `sbp.placement`, or a `jax.sharding.Mesh`.
      in_sbp: a pytree prefix of signatures for the arguments that are not static, in the order of the
        function's parameters, whether they are given by position or by keyword; or a dict of such by the
        parameters' names, which alone reaches those that have no position. AUTO is chosen.
      out_sbp: the same for the results; state that comes back keeps its argument's signature.
      donate_argnums, donate_argnames: arguments whose memory the results may take; they are gone after the
        call. The positions say the names, and the names the positions, as in `jax.jit`.
      static_argnums, static_argnames: arguments that are Python values. Negative positions count from the
        end of the parameters, or of the arguments where a function takes any number.
      options: limits, hardware, checks.

    Raises:
      SbpError: for arguments that are not what they should be, all of them at once.

    >>> import jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> double = compile(lambda x: x * 2, placement("cpu", shape=(1,)))
    >>> double(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    from sbp.runtime import arguments
    from sbp.runtime.call import parameters
    from sbp.runtime.execute import Program

    own, wrong = parameters(fn, donate_argnums, donate_argnames, static_argnums, static_argnames)
    raise_all([*arguments.check_compile(fn, placement, options), *wrong])
    return Program(fn, placement, in_sbp, out_sbp, own, options or Options())
