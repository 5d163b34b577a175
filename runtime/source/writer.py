"""Lines and functions as the text of a module: names, comments, the user's lines, the rows of the plan."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sbp.passes.explain.plan import Collective
from sbp.passes.physical.program import Box, Compute
from sbp.passes.render.user_lines import function_at, text_at
from sbp.runtime.source.line_wrapping import WIDTH, comment, items, split, statement
from sbp.runtime.source.lines import MARKER, PICK, CodeLine, Function, ids_in, read_values
from sbp.runtime.source.names import Hints, Unique, common_name, identifier
from sbp.runtime.source.values import Var
from sbp.signature import format_sbp
from sbp.text.units import bytes_text, seconds_text

_NAMES_ELEMENT = re.compile(r"\w+ = [\w.]+\[[^\[\]]*\]$")


@dataclass
class NameHints:
    """What values are to be called, by number: gathered from all lines before any is printed.

    Arguments:
      hints: of the program.
      names: names that values would like.
    """

    hints: Hints
    names: dict[int, str] = field(default_factory=dict)

    def learn(self, lines: Iterable[CodeLine]) -> None:
        """Takes the wishes of lines, those of functions inside included."""
        for line in lines:
            if line.eqn is None:
                continue
            for f in line.defs:
                self._parameters(f, line)
                self.learn(f.lines)
            self._targets(line)

    def forget_layers(self, f: Function) -> None:
        """Inside a function of equal parts no name says which of them it is."""
        for ids in zip(*f.alike, strict=True):
            self.names[ids[0]] = common_name([self.names.get(i, "value") for i in ids])

    def _parameters(self, f: Function, line: CodeLine) -> None:
        assert line.eqn is not None
        inputs = [v for group in f.params for v in group]
        for v, x in zip(inputs, line.eqn.ins, strict=False):
            outer = self.names.get(x.id, "") if isinstance(x, Var) else ""
            self.names[v.id] = outer or "state"

    def _targets(self, line: CodeLine) -> None:
        assert line.eqn is not None
        if line.eqn.name == "axis_index":
            axis = line.eqn.params["axis_name"]
            name = axis if isinstance(axis, str) else "_".join(axis)
            self.names[line.targets[0].id] = identifier(f"{name}_index")
            return
        if line.eqn.name == "optimization_barrier":
            for v, x in zip(line.targets, line.eqn.ins, strict=False):
                self.names[v.id] = self.names.get(x.id, "held") if isinstance(x, Var) else "held"
            return
        name = self._picked(line) or self.hints.of(line.eqn, line.ends)[0]
        values = self.hints.outputs(line.eqn.step) if line.ends and len(line.targets) > 1 else []
        for k, v in enumerate(line.targets):
            known = self.hints.value(values[k]) if k < len(values) else ""
            self.names[v.id] = known or name

    def _picked(self, line: CodeLine) -> str:
        """The name of one element of a named value, such as `keys_3`; "" where the user's line names it."""
        found = PICK.fullmatch(line.code)
        base = self.names.get(int(found[1]), "") if found else ""
        if found is None or not base or not found[2].isdigit():
            return ""
        named = _NAMES_ELEMENT.match(text_at(self.hints.source(line.step)))
        return "" if named else f"{base}_{found[2]}"


@dataclass
class Scope:
    """The names inside a function of the module.

    Arguments:
      names: by number of the value.
    """

    names: dict[int, str]
    unique: Unique

    def text(self, code: str) -> str:
        """An expression with its names."""
        return MARKER.sub(lambda m: self.names[int(m[1])], code)

    def name(self, id: int, wanted: str) -> str:
        """A name for a value, its own from now on."""
        self.names[id] = self.unique.name(wanted)
        return self.names[id]


@dataclass
class Printer:
    """Prints functions.

    Arguments:
      names: what values would like to be called.
      rows: of the plan, by name.
      functions: names of the module's functions, by number.
    """

    names: NameHints
    rows: Mapping[str, Collective]
    functions: dict[int, str]
    printed_names: set[str] = field(default_factory=set)

    def function(
        self,
        name: str,
        params: Sequence[Sequence[Var]],
        lines: Sequence[CodeLine],
        results: str,
        doc: Sequence[str],
    ) -> list[str]:
        """A function of the module."""
        scope = Scope(dict(self.functions), Unique.from_taken(self.functions.values()))
        return self._function(name, params, lines, results, scope, 0, doc)

    def _function(
        self,
        name: str,
        params: Sequence[Sequence[Var]],
        lines: Sequence[CodeLine],
        results: str,
        scope: Scope,
        indent: int,
        doc: Sequence[str] = (),
    ) -> list[str]:
        used = {i for line in lines for i in read_values(line)} | set(ids_in(results))
        args, taken = [], list[str]()
        for group in params:
            if len(group) == 1:
                args.append(scope.name(group[0].id, self._wanted(group[0])))
            else:
                alone = scope.unique.name("state" if group else "_")
                args.append(alone)
                taken += self._apart(alone, group, scope, indent + 4, used)
        out = statement(f"def {name}", f"({', '.join(args)})", indent, ":")
        out += [f"{' ' * (indent + 4)}{line}".rstrip() for line in doc]
        out += taken
        out += self._body(lines, scope, indent + 4, used)
        code = scope.text(results)
        fits = len(code) + indent + 11 <= WIDTH or len(split(code, (", ",))) == 1
        out += statement("return ", code if fits else f"({code})", indent + 4)
        return out

    def _wanted(self, v: Var) -> str:
        return self.names.names.get(v.id, "value")

    def _apart(
        self, whole: str, group: Sequence[Var], scope: Scope, indent: int, used: set[int]
    ) -> list[str]:
        if not group:
            return []
        names = [scope.name(v.id, self._wanted(v)) if v.id in used else "_" for v in group]
        return statement("", f"({', '.join(names)})", indent, f" = {whole}")

    def _body(self, lines: Sequence[CodeLine], scope: Scope, indent: int, used: set[int]) -> list[str]:
        out: list[str] = []
        where = ("", 0, "")
        around: tuple[object, ...] = ()
        for line in lines:
            for f in line.defs:
                name = scope.name(f.id, f.wanted_name)
                if out and out[-1]:
                    out.append("")
                out += self._function(name, f.params, f.lines, f.results, scope, indent)
                out.append("")
            code = scope.text(line.code)
            rows = self._rows(line)
            source = self.names.hints.source(line.step)
            here = (source.file, source.line, self.names.hints.phase(line.step))
            if line.step >= 0 and here[0] and (here != where or rows):
                if here != where:
                    block = (here[2], function_at(source), here[1] if not function_at(source) else 0)
                    if out and out[-1] and block != around:
                        out.append("")
                    around = block
                    out += self._line_of_user(line.step, indent)
                where = here
            out += [text for row in rows for text in comment(row, indent)]
            targets = self._targets(line, scope, used)
            own = "" if line.eqn is None else line.eqn.scope
            around_it = f'with jax.named_scope("{own}"): ' if own else ""
            made = statement(around_it + (f"{targets} = " if targets else ""), code, indent)
            if targets and not own and len(made[0]) > WIDTH:
                names = items(split(targets, (", ",)), indent + 4)
                made = [" " * indent + "(", *names, *statement(") = ", code, indent)]
            note = self._note(line)
            if note and len(made[-1]) + len(note) + 4 <= WIDTH:
                made[-1] += f"  # {note}"
            out += made
        return out

    def _targets(self, line: CodeLine, scope: Scope, used: set[int]) -> str:
        names = [scope.name(v.id, self._wanted(v)) if v.id in used else "_" for v in line.targets]
        if line.eqn is not None and line.eqn.name == "scan":
            n = line.eqn.operand_count
            carry, stacked = names[:n], names[n:]
            return ", ".join(_group(part) for part in (carry, stacked))
        return ", ".join(names)

    def _line_of_user(self, step: int, indent: int) -> list[str]:
        source, phase = self.names.hints.source(step), self.names.hints.phase(step)
        back = f" ({phase})" if phase not in ("", "forward") else ""
        text = text_at(source)
        line = f"{' ' * indent}# {source}{back}" + (f"  {text}" if text else "")
        return [line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."]

    def _rows(self, line: CodeLine) -> list[str]:
        """The rows of the plan that say why a line sends something, as comments; each is said once."""
        if line.eqn is None:
            return []
        steps = line.alike or (line.step,)
        names = list(dict.fromkeys(r for s in steps for r in self.names.hints.rows(s)))
        key = "+".join(names)
        if not names or key in self.printed_names or not any(n in self.rows for n in names):
            return []
        self.printed_names.add(key)
        found = [self.rows[n] for n in names if n in self.rows]
        first = found[0]
        over = " x ".join(first.axes)
        sent = sum(c.wire_bytes for c in found)
        takes = sum(c.seconds for c in found)
        label = f"{first.kind} over {over}, {bytes_text(sent)} sent, {seconds_text(takes)}"
        return [f"{' '.join(names)}: {label}: {first.reason}"]

    def _note(self, line: CodeLine) -> str:
        """The type of what a line makes, and how it lies."""
        if line.eqn is None or len(line.targets) != 1 or line.varied:
            return ""
        v = line.targets[0]
        kind = f"{v.dtype}[{', '.join(map(str, v.shape))}]"
        own = self.names.hints.own.get(v.id)
        if own is not None:
            return f"{kind} {self._lies(own)}"
        if not line.ends or line.step < 0 or len(self.names.hints.steps[line.step]) > 1:
            return kind
        found = {self._lies(step) for step in line.alike or (line.step,)}
        return f"{kind} {found.pop()}".rstrip() if len(found) == 1 else kind

    def _lies(self, at: int) -> str:
        """The signature of what a step makes; "" where it makes several tensors."""
        step = self.names.hints.steps[at][0]
        if isinstance(step, Box):
            return format_sbp(step.move.after)
        if isinstance(step, Compute) and len(step.strategy.results) == 1:
            return format_sbp(step.strategy.results[0])
        return ""


def _group(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"({', '.join(names)})" if names else "_"
