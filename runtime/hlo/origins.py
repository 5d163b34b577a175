"""From an instruction of a compiled program, or an event of its profile, back to the user and to the plan.

XLA keeps, per instruction, the name stack and the Python frames that JAX traced it with. A collective's name
stack holds the rows of the plan that it was inserted for; of collectives that XLA has combined, each element
of the result keeps its own.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sbp.compat import core
from sbp.passes.explain.collectives import ROW_SCOPE
from sbp.passes.explain.plan import Collective, PlanData
from sbp.runtime.hlo.meter import HasText, MeteredCollective, each_collective, text_of
from sbp.runtime.hlo.parser import Computation, Instruction, Module, pairs, parse, unquote

_ROWS = re.compile(re.escape(ROW_SCOPE) + r"(row\d+(?:\+row\d+)*)")


@dataclass(frozen=True, slots=True)
class Origin:
    """What one instruction comes from.

    Arguments:
      instruction: its name, which is also that of its events in a profile.
      opcode: what it is, such as "fusion".
      path: the user's function, scopes and op, such as "jit(train_step)/shard_map/jvp(layer0)/dot_general".
      file, line: the user's innermost line; that of a library where no frame is the user's; "" and 0 if XLA
        has made the instruction itself.
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
    return _Reader(parse(text_of(compiled))).origins()


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
    found = _Reader(module).origins()
    rows = {c.name: c for c in plan.collectives}
    return {
        name: _meant([[rows[r] for r in group if r in rows] for group in found[name].groups], metered)
        for name, metered in each_collective(module)
    }


def _meant(groups: Sequence[Sequence[Collective]], metered: MeteredCollective) -> tuple[Collective, ...]:
    """Which rows of an op an instruction is for, where the op sends several things: by kind, then by size."""
    kinds = [[c for c in group if c.kind == metered.kind] or list(group) for group in groups]
    alike = list({c.name: c for group in kinds for c in group}.values())
    each = [c.wire_bytes / max(c.count, 1) for c in alike]
    if len(groups) == 1 and not _close(math.fsum(each), metered.wire_bytes):
        alike = [c for c, b in zip(alike, each, strict=True) if _close(b, metered.wire_bytes)] or alike
    return tuple(alike)


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3)


class _Reader:
    """Reads the metadata of one module."""

    def __init__(self, module: Module) -> None:
        self.module = module
        first = pairs(module.tables["StackFrames"].get("1", ()))
        # XLA counts frames from 1, 0 is none; but it prints the parent's number with one added.
        self.shift = int(first.get("parent_frame_id", 0))

    def origins(self) -> dict[str, Origin]:
        """The origin of every instruction."""
        combined = self._combined()
        found: dict[str, Origin] = {}
        for computation in self.module.computations.values():
            for x in computation.instructions.values():
                path = _metadata(x).get("op_name", "")
                groups = dict.fromkeys([*_groups(path), *combined.get(x.name, ())])
                found[x.name] = Origin(x.name, x.opcode, path, *self._line(x), tuple(groups))
        return found

    def _combined(self) -> dict[str, list[tuple[str, ...]]]:
        """The groups of rows of the elements of each instruction's result."""
        out: dict[str, list[tuple[str, ...]]] = {}
        for computation in self.module.computations.values():
            for x in computation.instructions.values():
                if x.opcode == "get-tuple-element":
                    groups = _groups(_metadata(x).get("op_name", ""))
                    out.setdefault(self._begun(computation, x.operands[0]), []).extend(groups)
        return out

    def _begun(self, computation: Computation, name: str) -> str:
        """The instruction that begins what the one of a name ends."""
        x = computation.instructions.get(name)
        while x is not None and x.opcode.endswith("-done"):
            x = computation.instructions.get(x.operands[0])
        for called in x.called("calls") if x is not None and x.opcode == "async-start" else ():
            return self.module.computations[called].root
        return name if x is None else x.name

    def _line(self, x: Instruction) -> tuple[str, int]:
        """The innermost line of the user, else the innermost one."""
        frames = list(self._frames(_metadata(x)))
        return next((f for f in frames if core.is_user_file(f[0])), frames[0] if frames else ("", 0))

    def _frames(self, metadata: Mapping[str, str]) -> Iterator[tuple[str, int]]:
        """The Python frames (file, line) of an instruction, innermost first."""
        tables = self.module.tables
        number = int(metadata.get("stack_frame_id", 0))
        if not number and "source_file" in metadata:
            yield metadata["source_file"], int(metadata.get("source_line", 0))
        while number > 0 and str(number) in tables["StackFrames"]:
            frame = pairs(tables["StackFrames"][str(number)])
            location = pairs(tables["FileLocations"][frame["file_location_id"]])
            yield unquote(tables["FileNames"][location["file_name_id"]][0]), int(location["line"])
            parent = int(frame.get("parent_frame_id", 0)) - self.shift
            number = parent if parent < number else 0


def _metadata(x: Instruction) -> dict[str, str]:
    return pairs(x.attributes.get("metadata", ()))


def rows_in(text: str) -> set[str]:
    """The names of all rows of the plan that a text of a program mentions.

    >>> sorted(rows_in('loc("jit(f)/sbp.row3+row4/psum")'))
    ['row3', 'row4']
    """
    return {row for group in _groups(text) for row in group}


def _groups(path: str) -> list[tuple[str, ...]]:
    return [tuple(group.split("+")) for group in _ROWS.findall(path)]
