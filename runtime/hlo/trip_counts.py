"""How often a while loop of an HLO module runs: what XLA states, else what its counters say."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sbp.compat.exact_keys import memo
from sbp.runtime.hlo.parser import Computation, Instruction, integers, split, tokenize, unquote

Computations = dict[str, Computation]


def trip_count(computations: Computations, where: Computation, loop: Instruction) -> int | None:
    """Trips of a `while` that stands in `where`; None when they are not in the text.

    XLA's own `known_trip_count` comes first. Without it the condition must compare integers that each trip
    moves by a constant (or leaves alone), with starting values that are constants in `where`.
    """
    stated = _stated(loop)
    return _Loop(computations, where, loop).trips() if stated is None else stated


def _stated(instruction: Instruction) -> int | None:
    """`known_trip_count` of a while's backend_config, which older XLA prints as one escaped string."""
    config = instruction.attributes.get("backend_config", ())
    tokens = tokenize(unquote(config[0])) if len(config) == 1 else config
    if '"known_trip_count"' not in tokens:
        return None
    return integers(unquote(t) for t in tokens[tokens.index('"known_trip_count"') :])[0]


@dataclass(frozen=True, slots=True)
class _Affine:
    """A scalar integer: loop-state element `slot` (None: nothing) plus `offset`."""

    slot: int | None
    offset: int


@dataclass(frozen=True, slots=True)
class _Compare:
    direction: str
    left: _Affine
    right: _Affine


_Value = _Affine | _Compare | tuple["_Value", ...] | None
_SAME = ("copy", "bitcast", "convert", "reshape", "optimization-barrier")


class _Frame:
    """Evaluates the scalar integers of one computation, given its arguments; None is "not known"."""

    def __init__(self, module: Computations, computation: Computation, arguments: Sequence[_Value]):
        self._module, self._computation, self._arguments = module, computation, arguments

    @memo
    def value(self, name: str) -> _Value:
        instruction = self._computation.instructions[name]
        # Arrays cannot be counters; skipping them keeps the evaluation small.
        is_array = instruction.shape[1:2] == ["["] and instruction.shape[2] != "]"
        return None if is_array else self._evaluate(instruction)

    def _evaluate(self, instruction: Instruction) -> _Value:
        match instruction.opcode:
            case "parameter":
                position = int(instruction.arguments[0])
                return self._arguments[position] if position < len(self._arguments) else None
            case "constant":
                literal = "".join(instruction.arguments)
                return _Affine(None, int(literal)) if re.fullmatch(r"-?\d+", literal) else None
        operands = [self.value(name) for name in instruction.operands]
        match instruction.opcode, operands:
            case "tuple", _:
                return tuple(operands)
            case "get-tuple-element", [tuple(elements)]:
                return elements[int(instruction.attributes["index"][0])]
            case opcode, [same] if opcode in _SAME:
                return same
            case "add", [_Affine(slot, a), _Affine(None, b)] | [_Affine(None, b), _Affine(slot, a)]:
                return _Affine(slot, a + b)
            case "subtract", [_Affine(slot, a), _Affine(None, b)]:
                return _Affine(slot, a - b)
            case "compare", [_Affine() as left, _Affine() as right]:
                return _Compare(instruction.attributes["direction"][0], left, right)
            case "fusion" | "call", _:
                callee = self._module[instruction.called_computations("calls", "to_apply")[0]]
                return _Frame(self._module, callee, operands).value(callee.root)
        return None


class _Loop:
    """The trip count of a while whose condition compares counters that move by constant steps."""

    def __init__(self, module: Computations, computation: Computation, loop: Instruction) -> None:
        slots: _Value = tuple(_Affine(slot, 0) for slot in range(len(split(loop.shape[1:-1]))))
        if loop.shape[0] != "(":
            slots = _Affine(0, 0)
        self._before = _elements(_Frame(module, computation, ()).value(loop.operands[0]))
        condition, body = (module[loop.called_computations(key)[0]] for key in ("condition", "body"))
        self._test = _Frame(module, condition, [slots]).value(condition.root)
        self._after = _elements(_Frame(module, body, [slots]).value(body.root))

    def trips(self) -> int | None:
        if not isinstance(self._test, _Compare):
            return None
        left, right = self._start_and_step(self._test.left), self._start_and_step(self._test.right)
        if left is None or right is None:
            return None
        return _count(self._test.direction, left[0] - right[0], left[1] - right[1])

    def _start_and_step(self, value: _Affine) -> tuple[int, int] | None:
        if value.slot is None:
            return value.offset, 0
        if value.slot >= min(len(self._before), len(self._after)):
            return None
        match self._before[value.slot], self._after[value.slot]:
            case _Affine(None, start), _Affine(slot, step) if slot == value.slot:
                return start + value.offset, step
        return None


def _elements(value: _Value) -> tuple[_Value, ...]:
    return value if isinstance(value, tuple) else (value,)


def _count(direction: str, start: int, step: int) -> int | None:
    """How long `start + t * step` (direction) 0 holds for t = 0, 1, ...; None: for ever, or not known."""
    match direction:
        case "LT":
            return 0 if start >= 0 else -(start // step) if step > 0 else None
        case "LE":
            return _count("LT", start - 1, step)
        case "GT" | "GE":
            return _count("LT" if direction == "GT" else "LE", -start, -step)
        case "NE":
            ends = start == 0 or (step != 0 and -start % step == 0 and -start // step > 0)
            return (-start // step if start else 0) if ends else None
        case "EQ":
            return 0 if start != 0 else 1 if step != 0 else None
    return None
