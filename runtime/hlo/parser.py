"""HLO text -> computations and instructions: a tokenizer and one pass over the statements, no meaning."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sbp.communication.exchange import OVERFLOW

Tokens = Sequence[str]


class HloTextError(ValueError):
    """The text is not an HLO module that the meter can read."""


_TOKEN = re.compile(r"""/\*.*?\*/|"(?:\\.|[^"\\])*"|'[^']*'|->|<=|%?[\w.+\-]+|\S""")
_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


def tokenize(text: str) -> list[str]:
    return [token for token in _TOKEN.findall(text) if not token.startswith("/*")]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, as the meter, the simulator and profiles read it."""

    name: str
    opcode: str
    shape: Tokens
    arguments: Tokens
    attributes: dict[str, Tokens]

    @property
    def operands(self) -> list[str]:
        return [bare(part[-1]) for part in split(self.arguments)]

    def config(self) -> dict[str, Any]:
        """The backend_config; empty if it is no JSON. Older XLA prints it as one escaped string."""
        tokens = self.attributes.get("backend_config", ())
        text = unquote(tokens[0]) if len(tokens) == 1 else "".join(tokens)
        try:
            found = json.loads(text)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def called_computations(self, *attributes: str) -> list[str]:
        tokens = [token for key in attributes for token in self.attributes.get(key, ())]
        return [bare(token) for token in tokens if token not in ("{", "}", ",")]

    @property
    def inner(self) -> list[str]:
        """The computations inside it: of a fusion, a call, a custom call or an asynchronous start."""
        return self.called_computations("calls", "to_apply", "called_computations")

    @property
    def metadata(self) -> dict[str, str]:
        """JAX's notes on it: its name stack and its lines."""
        return pairs(self.attributes.get("metadata", ()))

    @property
    def path(self) -> str:
        """Its name stack, such as "jit(f)/layer0/dot_general"; "" for an instruction of XLA's own."""
        return self.metadata.get("op_name", "")

    @property
    def is_overflow(self) -> bool:
        """Whether it belongs to a round that runs only if a bucket of keys is fuller than planned."""
        return OVERFLOW in self.path

    @property
    def is_synchronous(self) -> bool:
        """Whether XLA runs its start and its done back to back."""
        return self.config().get("collective_backend_config", {}).get("is_sync") is True


@dataclass(slots=True)
class Computation:
    """Instructions by name, in the order of the text."""

    root: str = ""
    instructions: dict[str, Instruction] = field(default_factory=dict)


@dataclass(slots=True)
class Module:
    """One HLO module; `tables` hold the Python frames of its instructions."""

    header: dict[str, str] = field(default_factory=dict)
    entry: str = ""
    computations: dict[str, Computation] = field(default_factory=dict)
    tables: dict[str, dict[str, Tokens]] = field(default_factory=lambda: {name: {} for name in _TABLES})

    @property
    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """All instructions, with their computations."""
        for computation in self.computations.values():
            yield from ((computation, x) for x in computation.instructions.values())

    def frames(self, x: Instruction) -> Iterator[tuple[str, int]]:
        """The Python frames (file, line) of an instruction, innermost first."""
        metadata, frames = x.metadata, self.tables["StackFrames"]
        # XLA counts frames from 1, 0 is none; but it prints the parent's number with one added.
        shift = int(pairs(frames.get("1", ())).get("parent_frame_id", 0))
        number = int(metadata.get("stack_frame_id", 0))
        if not number and "source_file" in metadata:
            yield metadata["source_file"], int(metadata.get("source_line", 0))
        while number > 0 and str(number) in frames:
            frame = pairs(frames[str(number)])
            location = pairs(self.tables["FileLocations"][frame["file_location_id"]])
            yield unquote(self.tables["FileNames"][location["file_name_id"]][0]), int(location["line"])
            parent = int(frame.get("parent_frame_id", 0)) - shift
            number = parent if parent < number else 0


def parse(text: str) -> Module:
    module = Module()
    computation: Computation | None = None
    table = ""
    for statement in _statements(text):
        if statement[0] == "HloModule":
            if module.header:
                raise HloTextError("two HloModule headers in one text; meter each module on its own")
            module.header = {"name": statement[1], **pairs(statement)}
        elif statement[0] == "}":
            computation = None
        elif computation is not None:
            _add_instruction(computation, statement)
        elif statement[-1] == "{":
            is_entry = statement[0] == "ENTRY"
            name = bare(statement[is_entry])
            module.entry = name if is_entry else module.entry
            computation = module.computations[name] = Computation()
        elif statement[0] in _TABLES:
            table = statement[0]
        elif table:
            module.tables[table][statement[0]] = statement[1:]
    if computation is not None:
        raise HloTextError(f"computation {name!r} is never closed; a text that is cut off cannot be metered")
    return module


def _statements(text: str) -> Iterator[list[str]]:
    """Token lists, one per line; a comma at the end or an open bracket joins the next line."""
    pending: list[str] = []
    depth = 0
    for line in text.splitlines():
        tokens = tokenize(line)
        if not tokens:
            continue
        if pending and depth == 0 and pending[-1] != ",":
            yield pending
            pending = []
        pending += tokens
        depth = max(0, depth + sum(_DEPTH.get(token, 0) for token in tokens))
        if pending[-1] == "{" and "=" not in pending[1:3]:
            depth = 0  # the opening line of a computation
    if pending:
        yield pending


def _add_instruction(computation: Computation, statement: Tokens) -> None:
    is_root = statement[0] == "ROOT"
    name = bare(statement[is_root])
    start = 2 + is_root
    after_shape = _skip_shape(statement, start)
    close = closing_bracket(statement, after_shape + 1)
    attributes = {part[0]: part[2:] for part in split(statement[close + 1 :]) if part[1:2] == ["="]}
    arguments = statement[after_shape + 2 : close]
    computation.instructions[name] = Instruction(
        name, statement[after_shape], statement[start:after_shape], arguments, attributes
    )
    if is_root or not computation.root:
        computation.root = name


def _skip_shape(tokens: Tokens, start: int) -> int:
    """The index after the shape at `start`: a tuple, or dtype[dims] with an optional layout."""
    if tokens[start] == "(":
        return closing_bracket(tokens, start) + 1
    if tokens[start + 1] != "[":
        return start
    end = closing_bracket(tokens, start + 1) + 1
    return closing_bracket(tokens, end) + 1 if tokens[end] == "{" else end


def closing_bracket(tokens: Tokens, start: int) -> int:
    """The index of the bracket that closes the one at `start`."""
    depth = 0
    for index in range(start, len(tokens)):
        depth += _DEPTH.get(tokens[index], 0)
        if depth == 0:
            return index
    raise HloTextError(
        f"bracket {tokens[start]!r} is never closed in: {' '.join(tokens[:20])}; is the text cut off?"
    )


def split(tokens: Tokens) -> list[Tokens]:
    """The parts between commas that stand outside all brackets."""
    parts: list[list[str]] = [[]]
    depth = 0
    for token in tokens:
        depth += _DEPTH.get(token, 0)
        if token == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(token)
    return [part for part in parts if part]


def bare(token: str) -> str:
    return token.removeprefix("%")


def unquote(token: str) -> str:
    return re.sub(r"\\(.)", r"\1", token[1:-1]) if token[:1] in ("'", '"') else token


def pairs(tokens: Tokens) -> dict[str, str]:
    """Every `key=value` in the tokens, without its quotes."""
    signs = [i for i in range(1, len(tokens) - 1) if tokens[i] == "="]
    return {unquote(tokens[i - 1]): unquote(tokens[i + 1]) for i in signs}


def integers(tokens: Iterable[str]) -> list[int]:
    return [int(token) for token in tokens if token.isdecimal()]
