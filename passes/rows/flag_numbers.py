"""Numbers that go by a flag: what each is where the flag is set, and where it is not."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike

from sbp.compat import core
from sbp.compat.exact_keys import memo
from sbp.passes.program.edit import Editor
from sbp.passes.program.graph import Const, Node, Operand


class ByFlag(NamedTuple):
    """A number that goes by a flag.

    Arguments:
      flag: the flag, a value.
      cases: the number where it is not set, and where it is.
    """

    flag: int
    cases: tuple[ArrayLike, ArrayLike]


@dataclass(frozen=True)
class FlagNumbers:
    """The flags of one body of ops.

    Arguments:
      maker: the op that makes each value.
    """

    editor: Editor
    maker: Mapping[int, Node]

    @memo
    def number(self, x: Operand) -> ByFlag | None:
        """How a number goes by one flag; None for other operands.

        A tensor that is one number all over counts as a number.
        """
        if isinstance(x, Const):
            return None
        value, node = self.editor.operand(x), self.maker.get(x)
        if node is not None and value.shape:
            return self.number(node.inputs[0]) if node.op == "broadcast_in_dim" else None
        made = None if node is None or value.shape else self.op_result(node)
        is_flag = made is None and not value.shape and value.dtype == np.bool_
        return ByFlag(x, (False, True)) if is_flag else made

    def op_result(self, node: Node) -> ByFlag | None:
        """How what an op makes of such numbers goes by their flag."""
        if node.bodies or node.rule is None or not node.rule.pointwise:
            return None
        given = [x if isinstance(x, Const) else self.number(x) for x in node.inputs]
        flags = {x.flag for x in given if isinstance(x, ByFlag)}
        if None in given or len(flags) != 1:
            return None
        off, on = (_result(node, given, k) for k in (0, 1))
        return ByFlag(flags.pop(), (off, on))


def _result(node: Node, given: Sequence[Const | ByFlag | None], k: int) -> ArrayLike:
    """What an op on numbers gives in one of the two cases."""
    numbers = [np.asarray(x.value, x.dtype) if isinstance(x, Const) else x.cases[k] for x in given if x]
    with jax.ensure_compile_time_eval():
        return np.asarray(core.bind(node.primitive, numbers, dict(node.params))[0])
