"""Writes docs/ops.md, the table of ops and their signatures, and a table in docs/concepts.md, from the rules.

    python docs/make_ops.py

A rule is a function of an application (shapes, parameters), so its signatures are shown for one: the sample
of the tests that has the most of them. Ops that the JAX at hand does not have are left as the file has them,
so run this with the newest JAX that is supported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ops.md"
CONCEPTS = ROOT / "docs" / "concepts.md"
BEGIN, END = "<!-- begin: python docs/make_ops.py -->\n", "<!-- end -->\n"
GROUP = 2
SHOWN = 8
HEAD = """# Ops

Written by `python docs/make_ops.py` from the rules in [sbp/rules](../sbp/rules). Each line shows one
application of an op and its signatures along **one** device axis; the all-`B` signature, which every op
has, is left out, and signatures that rounding or the dtype forbids are not there. *Own body*: what runs on
the shards is not the same op with local shapes (it masks padding, moves indices, or places numbers by their
logical position). An op that is not in the table runs whole on every device, and the plan says so; [adding
one](adding_an_op.md) is one entry.

What a signature costs (its share of the work, what it sends, what its result waits for, what it does with
padding) and the signatures of other sizes, dtypes and parameters stand in
[tests/golden/algebra](../tests/golden/algebra), a text per family, for instance
[contractions](../tests/golden/algebra/contract.txt), and one of [boxing](../tests/golden/algebra/boxing.txt).
"""
FAMILIES = {
    "elementwise": "Element by element",
    "contract": "Contractions",
    "attention": "Attention",
    "reduce": "Reductions, and what goes in the order of a dim",
    "shape": "Shapes",
    "shift": "Rows that move",
    "index": "Indexing",
    "lookups": "Rows of tables",
    "update": "Steps of optimizers on rows",
    "row_sums": "Sums over gradients by rows",
    "windows": "Windows",
    "random": "Random numbers",
    "linalg": "Whole matrices",
    "structure": "Others",
}


def samples() -> dict[str, list[Any]]:
    """The samples of the tests, by op."""
    found: dict[str, list[Any]] = {}
    for file in sorted((ROOT / "tests" / "rules").glob("samples_*.py")):
        for sample in importlib.import_module(f"tests.rules.{file.stem}").SAMPLES:
            found.setdefault(sample.name, []).append(sample)
    return found


def signatures(sample: Any) -> tuple[str, list[str]] | None:
    """The operands of a sample's op, and its signatures along one axis; None if this JAX has no such op."""
    from sbp.passes.program.trace import trace
    from sbp.passes.program.views import op_of
    from sbp.rules import lookup
    from sbp.rules.entry import all_broadcast
    from sbp.rules.registry import valid_rows

    graph = trace(sample.fn, sample.args, {}).graph
    node = next((n for n in graph.walk() if n.op == sample.name), None)
    if node is None:
        return None
    operands = [graph.operand(x) for x in node.inputs]
    shapes = [tuple(x.shape) for x in operands]
    op = op_of(graph, node, shapes, [graph.values[v].shape for v in node.outputs], GROUP)
    rows = [r for r in valid_rows(lookup(sample.name), op) if r != all_broadcast(op)]
    text = ", ".join(f"{x.dtype}{list(s)}" for x, s in zip(operands, shapes, strict=True))
    lines = [", ".join(map(str, r.operands)) + " -> " + ", ".join(map(str, r.results)) for r in rows]
    return text, list(dict.fromkeys(lines))


def lines() -> dict[str, str]:
    """A table line per op; an op that this JAX has no sample of has one that ends in `no sample`."""
    from sbp.rules import REGISTRY

    by_name = samples()
    out = {}
    for name, rule in REGISTRY.items():
        if rule.family == "user":
            continue
        applied = [s for s in map(signatures, by_name.get(name, [])) if s is not None]
        shown, rows = max(applied, key=lambda s: len(s[1]), default=("no sample", []))
        text = "<br>".join(f"`{r}`" for r in rows[:SHOWN])
        if len(rows) > SHOWN:
            text += f"<br>and {len(rows) - SHOWN} more"
        what = " ".join((rule.rows.__doc__ or "").split())
        note = f"{rule.note[0].upper()}{rule.note[1:]}." if rule.note else ""
        remarks = " ".join(filter(None, (what, note, "*Own body.*" if rule.body else "")))
        out[name] = f"| `{name}` | {shown} | {text or '-'} | {remarks} |"
    return out


def odd_values() -> str:
    """Which ops may treat infinities, NaN and signs otherwise than one device: a line per way."""
    from sbp.rules import REGISTRY
    from sbp.rules.registry import USER

    ways: dict[str, set[str]] = {k: set() for k in ("factor", "zeros", "sign", "sum", "extremum")}
    for name, samples_ in samples().items():
        rule = REGISTRY.get(name)
        if rule is not None and rule.family != USER:
            for way in set().union(*(odd_rows(rule, s) for s in samples_)):
                ways[way].add(name)
    what = {
        "factor": "1. multiply the parts of a sum",
        "zeros": "1. treat zeros beside an infinity, or NaN, by the shape that they have",
        "sign": "1. add up or negate the parts of a sum: the sign of a zero alone",
        "sum": "2. leave sums of their own",
        "extremum": "3. leave maxima or minima",
    }
    rows = [f"| {text} | {', '.join(f'`{n}`' for n in sorted(ways[way]))} |" for way, text in what.items()]
    return "\n".join(["| which ops | |", "|---|---|", *rows]) + "\n"


def odd_rows(rule: Any, sample: Any) -> set[str]:
    """In which ways some signature of a sample's op may treat infinities, NaN and signs otherwise."""
    from sbp.rules.registry import valid_rows
    from sbp.signature import P, Partial

    found: set[str] = set()
    for op in ops_of(sample):
        for row in valid_rows(rule, op):
            parts = [s for s in row.operands if isinstance(s, Partial)]
            if row.needs_finite(op):
                found.add("zeros" if row.finite_only else "factor" if row.multiplies else "sign")
            elif not parts and P in row.results and not row.owned:
                found.add("sum")
            elif not parts and any(isinstance(s, Partial) and s != P for s in row.results):
                found.add("extremum")
    return found


def ops_of(sample: Any) -> Iterator[Any]:
    """The applications of a sample's op, as an axis of `GROUP` devices sees them."""
    from sbp.passes.program.trace import trace
    from sbp.passes.program.views import op_of

    graph = trace(sample.fn, sample.args, {}).graph
    for node in graph.walk():
        if node.op == sample.name:
            shapes = ([tuple(x.shape) for x in map(graph.operand, xs)] for xs in (node.inputs, node.outputs))
            yield op_of(graph, node, *shapes, GROUP)


def with_odd_values(page: str, table: str) -> str:
    """The page of concepts with its table replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def page(kept: str) -> Iterator[str]:
    """The page; lines of ops that have no sample here are taken from `kept`, the page as it was."""
    from sbp.rules import REGISTRY

    old = {line.split("`")[1]: line for line in kept.splitlines() if line.startswith("| `")}
    made = lines()
    yield HEAD
    for family in dict.fromkeys([*FAMILIES, *(r.family for r in REGISTRY.values() if r.family != "user")]):
        names = sorted(name for name in made if REGISTRY[name].family == family)
        yield f"## {FAMILIES.get(family, family)}\n\n| op | applied to | signatures | |\n|---|---|---|---|"
        for name in names:
            yield old.get(name, made[name]) if "| no sample |" in made[name] else made[name]
        yield ""
    yield "\n".join(without())


def without() -> Iterator[str]:
    """The section of what has no rule, and why."""
    from sbp.rules.without import WITHOUT

    yield "## Ops without a rule, and why\n"
    yield "Ops that hold their body (calls, `lax.composite`, `custom_partitioning`) are seen through; so are"
    yield "those that are written in other ops: sparse products (BCOO, BCSR, COO, CSR), `custom_vmap`,"
    yield "updates of factorisations, ops of libraries such as equinox, and more. Loops and branches are"
    yield "planned inside."
    yield "What is left:\n\n| why | ops |\n|---|---|"
    for group in WITHOUT:
        yield f"| {group.why} | {', '.join(f'`{op}`' for op in group.ops)} |"


def main() -> None:
    """Writes the page."""
    kept = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    PAGE.write_text("\n".join(page(kept)).rstrip() + "\n", encoding="utf-8")
    concepts = CONCEPTS.read_text(encoding="utf-8")
    CONCEPTS.write_text(with_odd_values(concepts, odd_values()), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
