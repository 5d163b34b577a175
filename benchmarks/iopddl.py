"""Google's planning problems (github.com/google/iopddl), solved with the planner's solver.

    python benchmarks/iopddl.py FILE.json.gz ... --seconds N [--out DIR]

Prints a row per file, and writes DIR/NAME.json with the strategies. The problems are those of the contest on
intra-operator parallelism of ASPLOS 2025: one strategy per node, costs of nodes and edges, and a limit on the
memory of what is alive at the same time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # as a script, Python looks for modules beside it, not in the repository's root
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sbp.passes.plan.budget import Budget, BudgetSolution, Load
from sbp.passes.plan.effort import until_over
from sbp.passes.plan.network import CostNetwork, Table
from sbp.passes.plan.solve import solve_within

FORBIDDEN = 10**17
"""Costs from here on forbid: the problems have 10^18."""
FINISH_SECONDS = 1.0
"""Kept for writing down the answer, with this part of all:"""
FINISH_SHARE = 0.02


def read(path: Path) -> Any:
    """The problem in a file, compressed or not."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        return json.load(file)["problem"]


def problem_of(data: Any) -> tuple[CostNetwork, Budget]:
    """A problem as the solver takes it. Equal tables become the same object."""
    unary = tuple(_costs(costs) for costs in data["nodes"]["costs"])
    known: dict[Any, Table] = {}
    edges = []
    for (i, j), costs in zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True):
        shape = unary[i].size, unary[j].size
        key = (*shape, tuple(costs))
        if key not in known:
            known[key] = _costs(costs).reshape(shape)
        edges.append((i, j, known[key]))
    spans, sizes = data["nodes"]["intervals"], data["nodes"]["usages"]
    loads = tuple(
        Load(node, start, end, np.array(size, dtype=np.float64))
        for node, ((start, end), size) in enumerate(zip(spans, sizes, strict=True))
        if start < end
    )
    return CostNetwork(unary, tuple(edges)), Budget(loads, float(data["usage_limit"]))


def exact_cost(data: Any, states: Sequence[int]) -> int:
    """The cost in integers, as the contest counts it."""
    nodes = data["nodes"]["costs"]
    total = sum(costs[state] for costs, state in zip(nodes, states, strict=True))
    for (i, j), costs in zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True):
        total += costs[states[i] * len(nodes[j]) + states[j]]
    return int(total)


def solved(path: Path, seconds: float) -> tuple[dict[str, Any], BudgetSolution]:
    """What is written down for a file, after at most so many seconds, reading included."""
    began = time.monotonic()
    data = read(path)
    network, budget = problem_of(data)
    kept = FINISH_SECONDS + FINISH_SHARE * seconds
    left = max(0.0, seconds - kept - (time.monotonic() - began))
    # The clock ends it: what is counted may take a quarter of that.
    found = solve_within(network, budget, effort=until_over(left).at_most(4.0 * left))
    record = {
        "strategies": list(found.states),
        "cost": exact_cost(data, found.states),
        "bound": found.bound,
        "feasible": found.fits and found.cost < np.inf,
        "seconds": round(time.monotonic() - began, 2),
    }
    return record, found


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks/iopddl.py")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, required=True, help="wall clock for each file")
    parser.add_argument("--out", type=Path, help="folder for NAME.json")
    options = parser.parse_args(argv)
    print("| instance | cost | bound | gap | fits | seconds | CPU seconds |\n|---|---|---|---|---|---|---|")
    for path in options.files:
        began = time.process_time()
        record, found = solved(path, options.seconds)
        name = path.name.split(".")[0]
        cpu = time.process_time() - began
        print(
            f"| {name} | {record['cost']:,} | {found.bound:,.0f} | {found.gap:.4%} | {record['feasible']} "
            f"| {record['seconds']:.1f} | {cpu:.1f} |",
            flush=True,
        )
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / f"{name}.json").write_text(json.dumps(record))


def _costs(costs: Sequence[float]) -> Table:
    table = np.array(costs, dtype=np.float64)
    table[table >= FORBIDDEN] = np.inf
    return table


if __name__ == "__main__":
    main()
