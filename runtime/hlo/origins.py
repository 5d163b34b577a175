"""Traces an instruction of a compiled program, or an event of its profile, to the user's line and the plan.

XLA keeps, per instruction, the name stack and the Python frames of JAX's trace. The name stack of a
collective holds its rows of the plan; of collectives that XLA has combined, each element of the result keeps
its own.
"""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.compat import core
from sbp.passes.explain.collectives import ROW_SCOPE
from sbp.passes.explain.plan import Collective, PlanData
from sbp.runtime.hlo.meter import HasText, MeteredCollective, each_collective, text_of
from sbp.runtime.hlo.parser import Computation, Instruction, Module, parse

_ROWS = re.compile(re.escape(ROW_SCOPE) + r"(row\d+(?:\+row\d+)*)")


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of one instruction.

    Arguments:
      instruction: its name, which is also that of its events in a profile.
      opcode: such as "fusion".
      path: the user's function, scopes and op, such as "jit(train_step)/shard_map/jvp(layer0)/dot_general".
      file, line: the user's innermost line; that of a library if no frame is the user's; "" and 0 if XLA has
        made the instruction itself.
      groups: the names of the plan's collectives that it is executed for: a group per collective that was
        combined; an op that sends several things has named all of them in each.
    """

    instruction: str
    opcode: str
    path: str
    file: str
    line: int
    groups: tuple[tuple[str, ...], ...] = ()

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of all rows of the plan."""
        return tuple(dict.fromkeys(row for group in self.groups for row in group))

    @property
    def source(self) -> str:
        """The line as the plan writes it, such as "gpt.py:150"; "" for none."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""


def origins_of(compiled: HasText) -> dict[str, Origin]:
    """The origin of every instruction of a compiled program, by its name.

    Arguments:
      compiled: what `program.lower(*args).compile()` gives.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.

    >>> import jax, jax.numpy as jnp
    >>> def double(x):
    ...     with jax.named_scope("twice"):
    ...         return jnp.sin(x) * 2
    >>> found = origins_of(jax.jit(double).lower(jnp.ones(3)).compile())
    >>> sorted({o.path for o in found.values() if "sin" in o.path})
    ['jit(double)/twice/sin']
    """
    return _origins(parse(text_of(compiled)))


def rows_of(compiled: HasText, plan: PlanData) -> dict[str, tuple[Collective, ...]]:
    """The rows of the plan that each collective of a compiled program is executed for, by its name.

    Arguments:
      compiled: what `program.lower(*args).compile()` gives.
      plan: `program.plan(*args)`.

    Raises:
      HloTextError: if the backend gives no text, or one that cannot be read.

    >>> import jax.numpy as jnp
    >>> import sbp
    >>> mean = sbp.compile(lambda x: x.mean(), sbp.placement("cpu", shape=(1,)))
    >>> x = jnp.ones(8)
    >>> rows_of(mean.lower(x).compile(), mean.plan(x))  # one device sends nothing
    {}
    """
    module = parse(text_of(compiled))
    found = _origins(module)
    rows = {c.name: c for c in plan.collectives}
    return {
        name: _meant([[rows[r] for r in group if r in rows] for group in found[name].groups], metered)
        for name, metered in each_collective(module)
    }


def _meant(groups: Sequence[Sequence[Collective]], metered: MeteredCollective) -> tuple[Collective, ...]:
    """The rows of an op that an instruction is for, if the op sends several things: by kind, then by size."""
    kinds = [[c for c in group if c.kind == metered.kind] or list(group) for group in groups]
    alike = list({c.name: c for group in kinds for c in group}.values())
    each = [c.wire_bytes / max(c.count, 1) for c in alike]
    if len(groups) == 1 and not _close(math.fsum(each), metered.wire_bytes):
        alike = [c for c, b in zip(alike, each, strict=True) if _close(b, metered.wire_bytes)] or alike
    return tuple(alike)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3)


def _origins(module: Module) -> dict[str, Origin]:
    """The origin of every instruction."""
    combined: dict[str, list[tuple[str, ...]]] = {}  # per instruction, the rows of the elements of its result
    for computation, x in module.instructions:
        if x.opcode == "get-tuple-element":
            combined.setdefault(_started(module, computation, x.operands[0]), []).extend(_groups(x.path))
    found: dict[str, Origin] = {}
    for _, x in module.instructions:
        groups = dict.fromkeys([*_groups(x.path), *combined.get(x.name, ())])
        found[x.name] = Origin(x.name, x.opcode, x.path, *_line(module, x), tuple(groups))
    return found


def _started(module: Module, computation: Computation, name: str) -> str:
    """The instruction that starts what the one of a name ends."""
    x = computation.instructions.get(name)
    while x is not None and x.opcode.endswith("-done"):
        x = computation.instructions.get(x.operands[0])
    for called in x.called_computations("calls") if x is not None and x.opcode == "async-start" else ():
        return module.computations[called].root
    return name if x is None else x.name


def _line(module: Module, x: Instruction) -> tuple[str, int]:
    """The innermost line of the user, else the innermost one."""
    frames = list(module.frames(x))
    return next((f for f in frames if core.is_user_file(f[0])), frames[0] if frames else ("", 0))


def rows_in(text: str) -> set[str]:
    """The names of all rows of the plan that a text of a program mentions.

    >>> sorted(rows_in('loc("jit(f)/sbp.row3+row4/psum")'))
    ['row3', 'row4']
    """
    return {row for group in _groups(text) for row in group}


def _groups(path: str) -> list[tuple[str, ...]]:
    return [tuple(group.split("+")) for group in _ROWS.findall(path)]
