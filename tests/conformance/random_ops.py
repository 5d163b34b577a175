"""The ops that random programs are made of: a table of code with holes.

A hole `{name:class}` is filled by the function of that name in random_holes.py; `x` is the first operand, and
other holes fit it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """What is known of a value when programs are drawn.

    Arguments:
      bound: no element is larger in magnitude.
      noise: how far two orders of summation may be apart, relative to the bound; 0 for exact values.
      made: the op that made it.
    """

    shape: tuple[int, ...]
    dtype: str
    bound: float
    noise: float
    made: Op | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)


GROW: dict[str, Callable[[list[float], Value, int], float]] = {
    "same": lambda b, x, n: max(b),
    "one": lambda b, x, n: 1.0,
    "four": lambda b, x, n: 6.0,
    "size": lambda b, x, n: float(max(x.shape, default=1)),
    "plus": lambda b, x, n: max(b) + 6,
    "add": lambda b, x, n: sum(b) + 1,
    "twice": lambda b, x, n: 2 * b[0] + 2,
    "mul": lambda b, x, n: math.prod(b),
    "square": lambda b, x, n: b[0] ** 2,
    "sum": lambda b, x, n: b[0] * max(1, x.size / max(1, n)),
    "total": lambda b, x, n: sum(b) * max(1, x.size),
    "dot": lambda b, x, n: b[0] * b[-1] * max(1, x.size),
}


@dataclass(frozen=True)
class Op:
    """One line with holes.

    Arguments:
      text: the code.
      how: "exact" keeps whole numbers whole, "smooth" rounds; "kink" is continuous, "jump" is not.
      grow: how bounds grow, a key of `GROW`.
      ndim: the fewest dims of `x`.
      empty: whether `x` may have no elements.
      backward: whether it has a gradient.
    """

    text: str
    how: str = "exact"
    grow: str = "same"
    ndim: int = 0
    empty: bool = True
    backward: bool = True

    @property
    def sums(self) -> bool:
        """Whether it adds elements up, so that its result may be partial."""
        return self.grow in ("sum", "total", "dot")

    def bound(self, bounds: list[float], x: Value, size: int) -> float:
        """The bound of a result of `size` elements."""
        return GROW[self.grow](bounds, x, size)


def _read(table: str) -> dict[str, list[Op]]:
    """The families of a table: after a family's name a row per op, with what `Op` wants before the code."""
    families: dict[str, list[Op]] = {}
    for row in table.strip().splitlines():
        said, bar, text = row.partition("|")
        if not bar:
            family = families.setdefault(said.strip(" :"), [])
            continue
        how, grow, *more = said.split()
        ndim = sum(int(word[0]) for word in more if word.endswith("d") and word[0].isdigit())
        family.append(Op(text.strip(), how, grow, ndim, "full" not in more, "forward" not in more))
    return families


# One family is drawn first, then one of its lines. "2d": of 2 dims at least; "full": no dim of size 0;
# "forward": without a gradient.
FAMILIES = _read("""
elementwise:
  exact twice          | -{x:m}
  exact twice          | {x:m} * 2 - 1
  exact twice          | 1 - {x:m}
  kink same            | jnp.abs({x:n})
  kink same            | jnp.maximum({x:n}, 0)
  kink same            | jax.nn.relu({x:f})
  kink same            | jnp.clip({x:n}, -2, 2)
  jump same            | jnp.sign({x:n})
  jump same            | jnp.floor({x:f} / 2)
  jump same            | {x:n} // 2
  jump same            | jnp.fmod({x:n}, 3)
  exact same           | ~{x:b}
  exact same           | jnp.isfinite({x:f})
  exact same           | {x:i} >> 1
  exact same           | {x:i} & 5
  exact same           | jnp.conj({x:m})
  exact same           | jnp.real({x:m})
  exact square         | jnp.square({x:m})
  exact square         | {x:m} ** 2
  smooth one           | jnp.sin({x:f})
  smooth one           | jnp.cos({x:f})
  smooth one           | jnp.tanh({x:f})
  smooth one           | jax.nn.sigmoid({x:f})
  smooth one           | jax.scipy.special.erf({x:f})
  smooth one           | jnp.arctan({x:f})
  smooth one           | 1 / (1 + jnp.square({x:f}))
  smooth one           | lax.rsqrt(1 + jnp.square({x:f}))
  smooth one           | jnp.exp(-jnp.square({x:f}))
  smooth one           | jax.checkpoint(lambda a: jnp.sin(jnp.sin(a) * a))({x:f})
  smooth one           | jax.jit(lambda a: jnp.cos(a * a))({x:f})
  smooth plus          | jnp.log1p(jnp.square({x:f}))
  smooth plus          | jnp.sqrt(1 + jnp.square({x:f}))
  smooth plus          | jax.nn.gelu({x:f})
  smooth plus          | jax.nn.silu({x:f})
  smooth plus          | jax.nn.softplus({x:f})
binary:
  exact add            | {x:m} + {y:m}
  exact add            | {x:m} - {y:m}
  exact add            | {x:i} + {y:b}
  exact add            | {x:f} - {y:i}
  exact mul            | {x:m} * {y:m}
  exact mul            | {x:f} * {y:b}
  kink same            | jnp.maximum({x:n}, {y:n})
  kink same            | jnp.minimum({x:n}, {y:n})
  jump one             | {x:n} < {y:n}
  jump one             | {x:n} >= {y:n}
  jump one             | {x:a} == {y:a}
  jump one             | {x:m} != {y:m}
  exact same           | {x:b} & {y:b}
  exact same           | {x:b} | ~{y:b}
  exact same           | {x:b} ^ {y:b}
  smooth same          | {x:f} / (1 + jnp.square({y:f}))
  smooth same          | {x:f} * jnp.sin({y:f})
  smooth square        | jnp.logaddexp({x:f}, {y:f})
  smooth square        | jnp.hypot({x:f}, 1 + jnp.square({y:f}))
  exact plus           | {x:i} ^ {y:i}
  exact plus           | {x:i} | {y:i}
  jump same            | jnp.remainder({x:i}, 1 + jnp.abs({y:i}))
where:
  exact same           | jnp.where({x:b}, {y:m}, 0)
  exact same           | jnp.where({x:b}, 1, {y:m})
  exact same           | jnp.where(~{x:b}, 2, {y:m})
  jump same            | jnp.where({x:n} > 0, {again}, {alike})
  jump same            | lax.select({x:n} > 1, {again}, {alike})
contract:
  exact dot 1d         | jnp.einsum({einsum:m})
  exact dot 2d         | jnp.einsum({einsum:f})
  exact dot 2d         | {x:m} @ {again}.mT
  exact dot            | jnp.vdot({x:f}, {alike})
  exact square 1d      | jnp.outer({x:n}, {again})
reduce:
  exact sum            | jnp.sum({x:a}, {axes}, keepdims={keep})
  exact sum            | jnp.sum({x:m}, {axes})
  exact sum            | jnp.sum({x:m}, {axes})
  kink same full       | jnp.max({x:n}, {axes})
  kink same full       | jnp.min({x:n}, {axes}, keepdims={keep})
  kink same full       | jnp.max({x:n}, {axes})
  exact same           | jnp.any({x:b}, {axes})
  exact same           | jnp.all({x:b}, {axes})
  jump total           | jnp.any({x:n} > 1, {axes})
  jump total           | jnp.count_nonzero({x:n}, {axes})
  kink one             | jnp.prod(jnp.clip({x:n}, -1, 1), {axes})
  smooth one           | jnp.prod(jnp.tanh({x:f}), {axes})
  smooth same full     | jnp.mean({x:f}, {axes})
  smooth same full     | jnp.mean({x:f}, {axes}, keepdims={keep})
  smooth square full   | jnp.var({x:f}, {axes})
  jump size full       | jnp.argmax({x:n}, {axis})
  jump size full       | jnp.argmin({x:n}, {axis})
  smooth plus full     | jax.nn.logsumexp({x:f}, {axes})
cumulative:
  exact total 1d       | jnp.cumsum({x:m}, {axis})
  exact total 1d       | lax.cumsum({x:m}, {axis}, reverse=True)
  kink same 1d         | lax.cummax({x:n}, {axis})
  kink same 1d         | lax.cummin({x:n}, {axis}, reverse=True)
  kink one 1d          | jnp.cumprod(jnp.clip({x:n}, -1, 1), {axis})
  smooth plus 1d full  | lax.cumlogsumexp({x:f}, {axis})
  exact total 1d full  | lax.associative_scan(jnp.add, {x:n}, axis={axis})
  exact twice 1d full  | jnp.diff({x:n}, axis={axis})
normalise:
  smooth one 1d full   | jax.nn.softmax({x:f}, {axis})
  smooth one 1d full   | jax.nn.softmax({x:f}, {axis})
  smooth twice 1d full | jax.nn.log_softmax({x:f}, {axis})
  smooth same 1d full  | jax.nn.standardize({x:f}, {axis}, epsilon=1.0)
  smooth same 1d       | {x:f} / (1 + jnp.sum({again} ** 2, {axis}, keepdims=True))
shape:
  exact same           | {x}.transpose({perm})
  exact same           | {x}.T
  exact same           | jnp.ravel({x})
  exact same           | {x}.reshape({reshaped})
  exact same           | {x}[{slices}]
  exact same           | {x}[{slices}]
  exact same 2d        | {x}.reshape({merged})
  exact same 2d        | {x}.reshape({merged})
  exact same 2d        | jnp.moveaxis({x}, 0, 1)
  exact same 2d        | jnp.tril({x:n})
  exact same 1d full   | {x}.reshape({cut})
  exact same 1d full   | {x}.reshape({cut})
  exact same 1d full   | jnp.expand_dims({x}, {axis})
  exact same 1d full   | jnp.flip({x}, {axis})
  exact same 1d full   | jnp.roll({x}, {shift}, {axis})
  exact same 1d full   | lax.pad({x:f}, jnp.zeros((), {again}.dtype), {pads})
  exact same 1d full   | lax.pad({x:i}, 3, {pads})
  exact same 1d full   | jnp.concatenate([{x}, {alike}], {axis})
  exact same 1d full   | jnp.concatenate([{x}, {alike}[1:], {again}])
  exact same 1d full   | jnp.stack([{x}, {alike}], {axis})
  exact same 1d full   | jnp.repeat({x}, 2, {axis})
  exact same 1d full   | jnp.tile({x}, 2)
  exact same 1d full   | jnp.broadcast_to({x}, (3, *{again}.shape))
  exact same 1d full   | jnp.pad({x:n}, 1, mode="edge")
  exact same 1d full   | jnp.squeeze({x}[:1], 0)
  exact same 1d full   | lax.rev({x}, ({axis},))
  exact sum 2d         | jnp.trace({x:n})
index:
  exact same 1d full   | jnp.take({x}, {index}, {axis}, mode="clip")
  exact same 1d full   | jnp.take({x}, {index}, {axis}, mode="wrap")
  exact same 1d full   | jnp.take({x:m}, {index}, {axis}, mode="fill", fill_value=0)
  exact same 1d full   | {x}[{index}]
  exact same 1d full   | {x}[jnp.array([0, -1, 0])]
  exact same 1d full   | {x:m}.at[{index}].set(1)
  exact same 1d full   | {x}.at[1:].set({again}[:-1])
  exact same 1d full   | lax.dynamic_slice_in_dim({x}, {number}, {upto}, -1)
  exact same 1d full   | lax.dynamic_index_in_dim({x}, {number}, {axis}, keepdims={keep})
  exact same 1d full   | lax.dynamic_update_slice_in_dim({x}, {again}[:1], {number}, 0)
  exact same 1d full   | lax.dynamic_update_slice({x}, {again}[..., :{upto}], [{number}] * {again}.ndim)
  exact total 1d full  | {x:m}.at[{index}].add(jnp.sum({again}))
  exact total 1d full  | {x:m}.at[{index}].add({again}[0])
  exact total 1d full  | {x:m}.at[::2].add({again}[::2])
  exact total 1d full  | jnp.repeat(0 * {x:m}[:1], 4, 0).at[jnp.arange(len({again})) % 5].add({again})
  exact total 1d full  | jax.ops.segment_sum({x:n}, jnp.arange(len({again})) * 5 % 3, 3)
  kink plus 1d full    | {x:n}.at[{index}].max(2)
  kink plus 1d full    | {x:n}.at[{index}].min({again}[0])
  jump same 1d full    | jnp.take_along_axis({x:n}, jnp.argsort({again}, {axis}), -1, mode='clip')
  exact one            | jax.nn.one_hot({x:i}, {small})
  exact one            | jax.nn.one_hot({x:i}, {small}, axis=0)
  jump four            | jnp.searchsorted(jnp.arange(-2.0, 3.0), {x:f})
order:
  kink same 1d         | jnp.sort({x:n}, {axis})
  kink same 1d         | jnp.sort({x:n}, {axis}, descending=True)
  jump size 1d         | jnp.argsort({x:n}, {axis})
  jump same 1d full    | lax.top_k({x:n}, {upto})[0]
  jump size 1d full    | lax.top_k({x:n}, {upto})[1]
  jump same 1d         | lax.sort([{x:n}, -{alike}], dimension={axis}, num_keys=1)[1]
random:
  smooth four          | jax.random.normal({key}, {shape})
  exact four           | jax.random.randint({key}, {shape}, -4, 5)
  exact twice          | jnp.where(jax.random.bernoulli({key}, 0.5, {y:m}.shape), 2, 1)
  exact same           | jax.random.fold_in({key}, 3)
  exact same           | jax.random.split({key}, 3)[1]
  exact plus           | jax.random.permutation({key}, {shape}[0])
source:
  exact four           | jnp.ones({x}.shape)
  exact four           | jnp.full({shape}, 2)
  exact four           | jnp.eye({small}, {small})
  exact four           | jnp.arange({small})
  exact four           | lax.broadcasted_iota(jnp.float32, {shape}, 0)
cast:
  jump same            | {x:n}.astype(jnp.int32)
  jump same            | {x:n} != 0
  jump same            | {x:n}.astype(bool)
  exact same           | {x:n}.astype(jnp.float32)
  exact same           | {x:b}.astype(jnp.float32)
  exact same           | {x:b}.astype(jnp.int32)
  exact same forward   | {x:n}.astype(jnp.bfloat16)
  exact same forward   | {x:n}.astype(jnp.bfloat16)
  exact twice          | {x:f}.astype(jnp.complex64)
  exact twice          | lax.complex({x:f} * jnp.float32(1), jnp.flip({again}) * jnp.float32(2))
  exact same           | jnp.imag({x:c})
  exact same           | jnp.real({x:c})
  smooth total 1d full | jnp.fft.fft({x:c})
control:
  exact twice          | lax.cond({number} > 0, lambda a: jnp.flip(a), lambda a: 2 - a, {x:n})
  exact twice          | lax.switch({number} % 3, [lambda a: a, lambda a: a + 1, lambda a: -a], {x:n})
  exact total 1d full  | lax.scan(lambda c, r: (c + r, c * 2), 0 * {x:n}[0], {again})[0]
  exact total 1d full  | lax.scan(lambda c, r: (c + r, c * 2), 0 * {x:n}[0], {again})[1]
  exact total 1d full  | lax.scan(lambda c, r: (r, c), {x:m}[0], {again}, reverse=True)[1]
  exact total 1d full  | lax.map(lambda r: jnp.sum(r) - r, {x:m})
  exact total 1d full  | jax.vmap(lambda r: jnp.cumsum(r[::-1]))({x:n}.reshape(len({again}), -1))
  smooth same 1d full  | lax.scan(lambda c, r: (jnp.sin(c + r), c), {x:f}[0], {again}, reverse=True)[1]
  smooth same 1d full  | lax.scan(lambda c, r: (jnp.sin(r + jnp.mean(c)), jnp.sum(c)), {x:f}[0], {again})[0]
  smooth same 1d full  | lax.fori_loop(0, 3, lambda i, c: jnp.sin(c + {x:f}), {again})
exact plus forward | lax.while_loop(lambda c: c[0] < {number} % 9, lambda c: (c[0] + 2, -c[1]), (0, {x:n}))[1]
""")
