"""Small faults in the library as it is, drawn by a seed.

A fault is one edit of one expression: another operator, a bound off by one, another sign, a check that never
raises. The default suite is measured by how many of them it finds; `python -m tests.mutants.run` says so.
"""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SEED = 36
PER_FOLDER = 2
FOLDERS = (
    *("sbp", "sbp/rules", "sbp/communication"),
    *(
        "passes/program",
        "passes/boxing",
        "passes/plan",
        "passes/physical",
        "passes/search",
        "passes/replan",
        "passes/schedule",
        "passes/pipeline",
    ),
    *("runtime/call", "runtime/lower", "runtime/execute", "runtime/pipeline", "runtime/embedding"),
)
COMPARISONS = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}
ARITHMETIC = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*"}
KINDS = ("comparison", "arithmetic", "bound", "sign", "check")


@dataclass(frozen=True)
class Fault:
    """One edit: of which file, at which line, and the file's text with it."""

    name: str
    file: str
    line: int
    after: str


Site = tuple[ast.expr, str]  # what is replaced, and by which text


def text_of(source: str, node: ast.AST) -> str:
    found = ast.get_source_segment(source, node)
    assert found is not None
    return found


def sites(source: str) -> dict[str, list[Site]]:
    """Every place in a function where a fault of each kind can be planted; one line each."""
    found: dict[str, list[Site]] = {kind: [] for kind in KINDS}

    def add(kind: str, node: ast.expr, text: str) -> None:
        if node.lineno == node.end_lineno:
            found[kind].append((node, text))

    for node in nodes_of_functions(ast.parse(source)):
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARISONS:
                other = COMPARISONS[type(op)]
                add("comparison", node, f"{text_of(source, left)} {other} {text_of(source, right)}")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                if not any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node)):
                    other = ARITHMETIC[type(op)]
                    add("arithmetic", node, f"({text_of(source, left)}) {other} ({text_of(source, right)})")
            case ast.Call(func=ast.Name(id="range"), args=[*_, stop]):
                add("bound", stop, f"({text_of(source, stop)}) - 1")
            case ast.Slice(lower=ast.Constant(value=int(value)) as lower):
                add("bound", lower, str(value + 1))
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
                add("sign", node, text_of(source, operand))
            case ast.If(test=test, body=[*_, ast.Raise()]):
                add("check", test, "False")
    return found


def nodes_of_functions(tree: ast.Module) -> Iterator[ast.AST]:
    """Each node of each function's body, without annotations and without texts made of values."""
    waiting: list[ast.AST] = [
        statement
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for statement in node.body
        if not isinstance(statement, ast.FunctionDef)
    ]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.JoinedStr | ast.AnnAssign | ast.FunctionDef):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def plant(source: str, site: Site) -> str:
    node, text = site
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    lines[node.lineno - 1] = (line[: node.col_offset] + text.encode() + line[node.end_col_offset :]).decode()
    return "".join(lines)


def faults() -> Iterator[Fault]:
    """The modules of a folder by lot, the kinds of faults in turn."""
    chance = random.Random(SEED)
    turn = 0
    for folder in FOLDERS:
        modules = sorted(p for p in (ROOT / folder).glob("*.py") if p.name != "__init__.py")
        chance.shuffle(modules)
        planted = 0
        while planted < PER_FOLDER:
            path = modules.pop()
            source = path.read_text(encoding="utf-8")
            found = sites(source)
            kinds = [*KINDS[turn % len(KINDS) :], *KINDS[: turn % len(KINDS)]]
            kind = next((k for k in kinds if found[k]), None)
            if kind is None:
                continue
            site = chance.choice(found[kind])
            after = plant(source, site)
            ast.parse(after)
            file = path.relative_to(ROOT).as_posix()
            yield Fault(f"{file}:{site[0].lineno} {kind}", file, site[0].lineno, after)
            planted, turn = planted + 1, turn + 1
