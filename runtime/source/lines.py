"""A block as lines of Python: chains of small ops are one expression, all else has a line and a name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sbp.runtime.source.collectives import COLLECTIVES, TALKING
from sbp.runtime.source.elements import ELEMENTS
from sbp.runtime.source.ir import LOOPS, reads
from sbp.runtime.source.operands import Operands, Spelling, primitive_text
from sbp.runtime.source.shapes import SHAPES
from sbp.runtime.source.text import GivenThings, Text, literal, marker, number
from sbp.runtime.source.values import Block, Eqn, Lit, Term, Var

MARKER = re.compile(r"«(\d+)»")
PICK = re.compile(r"«(\d+)»\[([-\d:, ]+)\]")
"""Part of a value, by numbers."""
LONGEST_CHAIN = 72
"""Characters of an expression that is still put into another one."""
LONGEST_ARGUMENT = 44
"""Those of an argument of a call that is not element by element."""
SHORT = 24
"""Those of an expression that is put into one of another line of the user's."""
_NAME = 7
"""Characters that a name is counted as."""
_SPELLINGS: Mapping[str, Spelling] = {**ELEMENTS, **SHAPES, **COLLECTIVES}
_HEAVY = ("conv_general_dilated", "sort", "gather", *LOOPS)


@dataclass(frozen=True, slots=True)
class CodeLine:
    """An assignment.

    Arguments:
      targets: what it names.
      code: the expression.
      eqn: what it computes; None where a tuple is only taken apart.
      defs: functions that stand before it.
      ends: whether a step of the plan ends with it.
      alike: the steps of all parts of the program that it stands for; its own alone if there are none.
      varied: whether these make tensors of different types.
    """

    targets: tuple[Var, ...]
    code: str
    eqn: Eqn | None
    defs: tuple[Function, ...] = ()
    ends: bool = False
    alike: tuple[int, ...] = ()
    varied: bool = False

    @property
    def step(self) -> int:
        """The position of its step; -1 for none."""
        return -1 if self.eqn is None else self.eqn.step

    @property
    def pure(self) -> bool:
        """Whether another line that says the same can stand for it."""
        return self.eqn is not None and not self.eqn.speaks and self.eqn.name not in TALKING and not self.defs


@dataclass(frozen=True, slots=True)
class Function:
    """A function of its own.

    Arguments:
      id: what stands for its name.
      wanted_name: its name, if that is free.
      params: one per argument: a value, or the values that it is taken apart into.
      results: the expression that it returns.
      calls: how often it is called, if it stands for several equal parts.
      alike: per part, the numbers of its arguments and of what its lines make, in one order.
    """

    id: int
    wanted_name: str
    params: tuple[tuple[Var, ...], ...]
    lines: tuple[CodeLine, ...]
    results: str
    calls: int = 0
    alike: tuple[tuple[int, ...], ...] = ()


def ids_in(code: str) -> list[int]:
    """The values that an expression reads, in order."""
    return [int(i) for i in MARKER.findall(code)]


def length(code: str) -> int:
    """About how many characters an expression will have."""
    return len(MARKER.sub("x" * _NAME, code))


def group_text(codes: Sequence[str]) -> str:
    """Several expressions as one: one alone as it is."""
    return codes[0] if len(codes) == 1 else f"({', '.join(codes)})"


@dataclass
class Writer:
    """Writes blocks as lines.

    Arguments:
      objects: takes what cannot be written.
      keeps: says of an equation that ends its step, and of the one that uses it, whether it has a name of
        the user's, other than that.
      place: the user's line of an equation.
      own: whether a value has a step of its own beside that of its equation.
      fresh: numbers for functions.
      picks: parts of values that are written inside other expressions, by what is written.
    """

    objects: GivenThings
    keeps: Callable[[Eqn, Eqn], bool]
    place: Callable[[Eqn], Hashable]
    own: Callable[[Var], bool]
    fresh: Iterator[int]
    texts: dict[Var, Text] = field(default_factory=dict)
    equations: dict[Var, Eqn] = field(default_factory=dict)
    picks: dict[str, CodeLine] = field(default_factory=dict)

    def block(self, block: Block) -> tuple[list[CodeLine], list[str]]:
        """The lines of a block, and its results."""
        lines: list[CodeLine] = []
        uses = Counter(v for e in block.eqns for v in reads(e))
        # A result has a name.
        uses.update({v: 2 for v in block.outputs if isinstance(v, Var)})
        consumer = {v: e for e in block.eqns for v in e.ins if isinstance(v, Var)}
        last = {e.step: e for e in block.eqns}
        for eqn in block.eqns:
            self.equations.update(dict.fromkeys(eqn.outs, eqn))
            ends = last[eqn.step] is eqn
            if eqn.name in LOOPS:
                lines.append(self._loop(eqn, ends))
                continue
            text = self._spelled(eqn)
            if eqn.name == "broadcast_in_dim" and not text.number and length(text.code) > LONGEST_CHAIN:
                # What is spread has the name: the spreading is left to NumPy's rules.
                if eqn.ins[0] in self.texts:
                    lines.append(self._named(eqn.ins[0]))
                text = self._spelled(eqn)
            if len(eqn.outs) == 1 and self._inline(eqn, text, uses[eqn.outs[0]], consumer, ends):
                self.texts[eqn.outs[0]] = text
                if PICK.fullmatch(text.code) and text.shape is None:
                    self.picks.setdefault(text.code, CodeLine(eqn.outs, text.code, eqn))
                continue
            if text.exactly:
                text = Text(text.exactly)
            elif text.shape is not None and text.shape != eqn.outs[0].shape:
                text = Text(f"jnp.broadcast_to({text.code}, {eqn.outs[0].shape})")
            lines.append(CodeLine(eqn.outs, text.code, eqn, ends=ends))
        return lines, [self.read(x) for x in block.outputs]

    def read(self, x: Term) -> str:
        """An operand of its very shape and type."""
        return Operands(_nothing(x), [self.text(x)], self.objects).arg(0)

    def text(self, x: Term) -> Text:
        """What is written for an operand."""
        if isinstance(x, Lit):
            return Text(number(x.value, x.dtype))
        return self.texts.get(x, Text(marker(x.id)))

    def _spelled(self, eqn: Eqn) -> Text:
        operands = Operands(eqn, [self.text(x) for x in eqn.ins], self.objects)
        spelling = _SPELLINGS.get(eqn.name)
        return (spelling(operands) if spelling is not None else None) or primitive_text(operands)

    def _named(self, x: Term) -> CodeLine:
        """A line for what would have been put into another one."""
        assert isinstance(x, Var)
        code = self.read(x)
        del self.texts[x]
        return CodeLine((x,), code, self.equations[x])

    def _inline(self, eqn: Eqn, text: Text, uses: int, consumer: Mapping[Var, Eqn], ends: bool) -> bool:
        """Whether an expression is put into the one that uses it."""
        size, (out,) = length(text.code), eqn.outs
        if MARKER.fullmatch(text.code) and text.shape is None:
            return True
        if eqn.speaks or eqn.name in TALKING or eqn.name.startswith("random"):
            return False
        if not ids_in(text.code) and size <= LONGEST_ARGUMENT and eqn.name != "axis_index":
            return True
        # What is cheap to write and to compute may be written as often as it is used.
        if eqn.name == "broadcast_in_dim" and size <= _NAME + 22 and "(" not in text.code:
            return True
        user = consumer.get(out)
        if uses != 1 or user is None or ((ends or self.own(out)) and self.keeps(eqn, user)):
            return False
        if eqn.name in _HEAVY or user.name in LOOPS or eqn.scope != user.scope:
            return False
        if size > SHORT and self.place(eqn) != self.place(user):
            return False
        light = user.name in ELEMENTS or user.name.startswith(
            ("reduce_", "broadcast", "reshape", "transpose")
        )
        if eqn.name == "dot_general":
            return light and size <= (LONGEST_CHAIN if user.name == "transpose" else LONGEST_ARGUMENT)
        return size <= (LONGEST_CHAIN if light else LONGEST_ARGUMENT)

    def _loop(self, eqn: Eqn, ends: bool) -> CodeLine:
        return {"scan": self._scan, "while": self._while, "cond": self._cond}[eqn.name](eqn, ends)

    def _function(
        self, wanted: str, params: Sequence[Sequence[Var]], block: Block, split: int = -1
    ) -> Function:
        lines, results = self.block(block)
        if split >= 0:
            shown = f"{group_text(results[:split])}, {group_text(results[split:])}"
        else:
            shown = group_text(results)
        return Function(next(self.fresh), wanted, tuple(map(tuple, params)), tuple(lines), shown)

    def _scan(self, eqn: Eqn, ends: bool) -> CodeLine:
        (body,), n = eqn.blocks, eqn.operand_count
        function = self._function("body", (body.inputs[:n], body.inputs[n:]), body, n)
        given = [self.read(x) for x in eqn.ins]
        p = eqn.params
        extra = f", length={p['length']}" + (", reverse=True" if p["reverse"] else "")
        if p.get("unroll", 1) not in (1, False):
            extra += f", unroll={literal(p['unroll'], 'unroll', self.objects)}"
        xs = group_text(given[n:]) if given[n:] else "None"
        code = f"lax.scan({marker(function.id)}, {group_text(given[:n])}, {xs}{extra})"
        return CodeLine(eqn.outs, code, eqn, (function,), ends)

    def _while(self, eqn: Eqn, ends: bool) -> CodeLine:
        condition, body = (
            self._function(name, (block.inputs,), block)
            for name, block in zip(("condition", "body"), eqn.blocks, strict=True)
        )
        init = group_text([self.read(x) for x in eqn.ins])
        code = f"lax.while_loop({marker(condition.id)}, {marker(body.id)}, {init})"
        return CodeLine(eqn.outs, code, eqn, (condition, body), ends)

    def _cond(self, eqn: Eqn, ends: bool) -> CodeLine:
        branches = [self._function(f"branch_{k}", (), block) for k, block in enumerate(eqn.blocks)]
        names = [marker(f.id) for f in branches]
        index = eqn.ins[0]
        made = self.equations.get(index) if isinstance(index, Var) else None
        if made is not None and len(names) == 2 and made.name == "convert_element_type":
            asked = made.ins[0]
            if asked.dtype == np.bool_ and index in self.texts:
                code = f"lax.cond({self.read(asked)}, {names[1]}, {names[0]})"
                return CodeLine(eqn.outs, code, eqn, tuple(branches), ends)
        code = f"lax.switch({self.read(index)}, ({', '.join(names)}))"
        return CodeLine(eqn.outs, code, eqn, tuple(branches), ends)


def _nothing(x: Term) -> Eqn:
    """An equation that only takes an operand."""
    return Eqn(None, {}, (x,), (), -1)


def read_values(line: CodeLine) -> list[int]:
    """All values that a line reads, those of its functions included and not their own."""
    own, found = set[int](), list[int]()
    for f in line.defs:
        own |= {f.id, *(v.id for group in f.params for v in group)}
        for inner in f.lines:
            found += read_values(inner)
            own |= {v.id for v in inner.targets}
        found += ids_in(f.results)
    return [i for i in dict.fromkeys([*found, *ids_in(line.code)]) if i not in own]
