"""Programs in which conversions meet collectives: a compiler may send the type before, or the type after.

`CASES` are compiled for CPUs and for GPUs: the plan's bytes are those of both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sbp import B, S
from sbp.signature import Signature


@dataclass(frozen=True)
class Conversion:
    """A function of one `[64, 512]` tensor of a type.

    Arguments:
      given, asked: how it arrives, and how results leave.
      itemsize: bytes of an element as it is sent.
    """

    fn: Callable[[Any], Any]
    dtype: Any
    given: Signature
    asked: Sequence[Signature]
    itemsize: int

    @property
    def arg(self) -> jax.ShapeDtypeStruct:
        """The shape and type of the argument."""
        return jax.ShapeDtypeStruct((64, 512), self.dtype)


def widened(x: Any) -> Any:
    """Split for one result, whole for the other: the wide tensor is gathered."""
    wide = x.astype(jnp.float32)
    return wide, wide


def widened_twice(x: Any) -> Any:
    wide = x.astype(jnp.bfloat16).astype(jnp.float32)
    return wide, wide


def rearranged(x: Any) -> Any:
    wide = x.astype(jnp.float32).reshape(8, 8, 512)[:, :4]
    return wide, wide


def narrowed(x: Any) -> Any:
    """Gathered for a sort of rows that needs all of them, which reads it narrowed."""
    return lax.sort(jnp.sin(x).astype(jnp.float16), dimension=0)


def summed(x: Any) -> Any:
    """A sum over the split dim is added up as it is, and rounded after that."""
    return x.astype(jnp.float32).sum(0)


def over_integers(x: Any) -> Any:
    """Integers that float32 does not hold."""
    wide = x.astype(jnp.float32)
    return wide, wide


CASES: Mapping[str, Conversion] = {
    "float16 widened": Conversion(widened, jnp.float16, S(0), (S(0), B), 2),
    "float16 widened, to another dim": Conversion(widened, jnp.float16, S(0), (S(0), S(1)), 2),
    "int8 widened": Conversion(widened, jnp.int8, S(0), (S(0), B), 1),
    "int16 widened": Conversion(widened, jnp.int16, S(0), (S(0), B), 2),
    "flags widened": Conversion(widened, jnp.bool_, S(0), (S(0), B), 1),
    "int8 widened twice": Conversion(widened_twice, jnp.int8, S(0), (S(0), B), 1),
    "float16 widened and cut": Conversion(rearranged, jnp.float16, S(0), (S(0), B), 2),
    "narrowed": Conversion(narrowed, jnp.float32, S(0), (B,), 2),
    "summed": Conversion(summed, jnp.float16, S(0), (B,), 4),
    "int32 to float32": Conversion(over_integers, jnp.int32, S(0), (S(0), B), 4),
}
