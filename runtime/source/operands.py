"""The operands of an equation as text, as its spelling wants them: with NumPy's broadcasting, or exact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sbp.compat import core
from sbp.runtime.source.text import ATOM, UNARY, GivenThings, Text, literal, number, typed_text
from sbp.runtime.source.values import Eqn, Lit


@dataclass(frozen=True)
class Operands:
    """What an equation is given.

    Arguments:
      texts: of its operands.
      objects: takes what cannot be written.
    """

    eqn: Eqn
    texts: Sequence[Text]
    objects: GivenThings

    @property
    def params(self) -> Mapping[str, Any]:
        """Of the equation."""
        return self.eqn.params

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """Of an operand."""
        return self.eqn.ins[i].shape

    def exact(self, i: int) -> Text:
        """An operand of its very shape and type."""
        x, text = self.eqn.ins[i], self.texts[i]
        if isinstance(x, Lit):
            return Text(typed_text(x.value, x.dtype))
        if text.exactly:
            return Text(text.exactly)
        if text.shape is None or text.shape == x.shape:
            return text
        return Text(f"jnp.broadcast_to({text.code}, {x.shape})")

    def is_number(self, i: int) -> bool:
        """Whether an operand is written as a number, which takes the type of what is beside it."""
        return isinstance(self.eqn.ins[i], Lit) or self.texts[i].number

    def arg(self, i: int) -> str:
        """An operand as the argument of a call, of its very shape and type."""
        return self.exact(i).code

    def args(self) -> str:
        """All operands as arguments of a call."""
        return ", ".join(self.arg(i) for i in range(len(self.texts)))

    def start(self, i: int) -> str:
        """An index: of a literal the number."""
        x = self.eqn.ins[i]
        return str(int(x.value)) if isinstance(x, Lit) else self.exact(i).code

    def broadcast(self, shape: Sequence[int], positions: Sequence[int] | None = None) -> list[Text]:
        """Operands that NumPy's broadcasting brings to one shape; numbers without their types beside others.

        Arguments:
          positions: of those that meet; all of them if None.
        """
        at = list(range(len(self.texts)) if positions is None else positions)
        found = [self._plain(i) for i in at]
        if all(self.is_number(i) for i in at):
            found[0] = self.exact(at[0])
        shapes = [t.shape if t.shape is not None else self.shape(i) for t, i in zip(found, at, strict=True)]
        if np.broadcast_shapes(*shapes) != tuple(shape):
            k = next((k for k, i in enumerate(at) if not self.is_number(i)), 0)
            found[k] = Text(f"jnp.broadcast_to({found[k].code}, {tuple(shape)})")
        return found

    def _plain(self, i: int) -> Text:
        x = self.eqn.ins[i]
        if not isinstance(x, Lit):
            return self.texts[i]
        code = number(x.value, x.dtype)
        return Text(code, UNARY if code.startswith("-") else ATOM)

    def literal(self, key: str) -> str:
        """A parameter as Python."""
        return literal(self.params[key], f"{self.eqn.name}_{key}", self.objects)

    def keywords(self, *keys: str) -> str:
        """Parameters as keywords, behind a comma; those that are None are left out."""
        shown = ((k, self.literal(k)) for k in keys if self.params.get(k) is not None)
        return "".join(f", {k}={v}" for k, v in shown)


Spelling: TypeAlias = Callable[[Operands], Text | None]
"""An equation as an expression; None if this one cannot be spelled so."""


def primitive_text(o: Operands) -> Text:
    """Any equation, by the name of its primitive; one that holds a function is handed to the module."""
    if any(map(core.holds_function, o.params.values())):
        call = _handed(o.eqn)
        name = o.eqn.params.get("name") or o.eqn.params.get("target_name") or o.eqn.name
        only = "[0]" if o.eqn.primitive.multiple_results and len(o.eqn.outs) == 1 else ""
        return Text(f"{o.objects.name(call, str(name))}({o.args()}){only}")
    # What a batch says of an exchange is nothing to an op that has none.
    params = "".join(f", {k}={o.literal(k)}" for k in o.params if k != "samples")
    operands = o.args()
    only = "[0]" if o.eqn.primitive.multiple_results and len(o.eqn.outs) == 1 else ""
    return Text(f'sbp.shards.bind("{o.eqn.name}"{", " if operands else ""}{operands}{params}){only}')


def _handed(eqn: Eqn) -> Callable[..., Any]:
    """A function of the operands of an equation that holds functions."""
    primitive, params = eqn.primitive, dict(eqn.params)

    def run(*operands: Any) -> Any:
        results = core.bind(primitive, operands, params)
        return tuple(results) if primitive.multiple_results else results[0]

    run.__name__ = run.__qualname__ = eqn.name
    return run
