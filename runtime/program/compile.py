"""`compile`. To import it is cheap: what traces, plans and runs is loaded when it is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import jax

from sbp.compat.untyped import Prefix
from sbp.errors import raise_all
from sbp.options import Options
from sbp.passes.explain.internal_errors import public
from sbp.placement import Placement
from sbp.signature import AUTO

if TYPE_CHECKING:
    from sbp.runtime.program.program import Program

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
        function's parameters, also for arguments that are given by keyword. Or a dict of prefixes by the
        names of parameters, which is needed for keyword-only parameters. The planner chooses what is AUTO,
        and the dim of `S(AUTO)`.
      out_sbp: the same for the results; returned state keeps the signatures of its argument.
      donate_argnums, donate_argnames: arguments whose memory the results may reuse; after the call they are
        deleted. Names follow from positions and positions from names, as in `jax.jit`.
      static_argnums, static_argnames: arguments that are Python values. Negative positions count from the
        last parameter, or from the last argument of a function with `*args`.
      options: limits, hardware, checks.

    Raises:
      SbpError: for wrong arguments; it lists all problems.

    >>> import jax.numpy as jnp
    >>> from sbp.placement import placement
    >>> double = compile(lambda x: x * 2, placement("cpu", shape=(1,)))
    >>> double(jnp.ones(2)).tolist()
    [2.0, 2.0]
    """
    from sbp.runtime.call import arguments
    from sbp.runtime.call.binding import parameters
    from sbp.runtime.program.program import Program

    own, wrong = parameters(fn, donate_argnums, donate_argnames, static_argnums, static_argnames)
    raise_all([*arguments.check_compile(fn, placement, options), *wrong])
    return Program(fn, placement, in_sbp, out_sbp, own, options or Options())
