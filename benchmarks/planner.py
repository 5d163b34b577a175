"""What planning must keep, each must with what was measured; and where planning time goes.

    python -m benchmarks.planner [--large] [--only gpt/8x8/12,brute/50] [--rounds 1]
    python -m benchmarks.planner --passes [--models gpt,resnet] [--layers 4] [--placement 2x4] [--checks]

The table of musts (benchmarks/musts.py) leaves out what takes minutes unless `--large` is given; `--only`
takes any by name. Times are CPU seconds, tracing not counted, in a process of its own; of some rounds the
median. Below it stand the tables that have a command of their own, since they need data.

With `--passes` the seconds of every pass, the least of some rounds, and what the checks between passes add;
with `--checks` only the totals. Checks are on by default as long as they take below 2 % of planning.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import jax

from benchmarks import cases
from benchmarks.musts import ELSEWHERE, MUSTS, Must, Verdict, planning_cost, traced
from sbp.passes.chain import PLACEMENT, Logical

MODELS = {
    "gpt": cases.gpt_case,
    "resnet": cases.resnet_case,
    "classifier": cases.classifier_case,
    "mlp": cases.mlp_case,
}


def timed(logical: Logical) -> list[tuple[str, float, float]]:
    """Per pass: its name, its seconds and those of its check."""
    found, at = [], logical
    for p in PLACEMENT.passes:
        began = time.process_time()
        at = p.run(at)
        done = time.process_time()
        p.holds(at)
        found.append((p.name, done - began, time.process_time() - done))
    return found


def must_line(must: Must, verdict: Verdict) -> str:
    """A row of the table of musts."""
    return f"| {must.name} | {must.target} | {verdict.measured} | {'met' if verdict.met else 'SHORT'} |"


def print_musts(names: Sequence[str], rounds: int) -> None:
    """Prints the table of musts, each row as soon as it is measured."""
    print("| must | target | measured | |\n|---|---|---|---|")
    for name in names:
        print(must_line(MUSTS[name], MUSTS[name].run(rounds)), flush=True)


def print_passes(options: argparse.Namespace) -> None:
    """Prints the table of passes."""
    shape = tuple(map(int, options.placement.split("x")))
    print("| model | pass | seconds | its check | check / planning |\n|---|---|---|---|---|")
    for model in options.models.split(","):
        logical = traced(MODELS[model], shape, options.layers)
        rounds = [timed(logical) for _ in range(options.rounds)]
        rows = [(r[0][0], min(x[1] for x in r), min(x[2] for x in r)) for r in zip(*rounds, strict=True)]
        whole, checks = sum(r[1] for r in rows), sum(r[2] for r in rows)
        for name, seconds, check in () if options.checks else rows:
            print(f"| {model} | {name} | {seconds:.3f} | {check:.4f} | {check / whole:.2%} |")
        print(f"| {model} | **all** | {whole:.3f} | {checks:.4f} | {checks / whole:.2%} |")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__.splitlines()[0])
    parser.add_argument("--large", action="store_true", help="also what takes minutes")
    parser.add_argument("--only", metavar="NAME,...", help=f"of the musts: {', '.join(MUSTS)}")
    parser.add_argument("--rounds", type=int, default=1, help="of what is timed")
    parser.add_argument("--passes", action="store_true", help="where the time goes, pass by pass")
    parser.add_argument("--models", default="gpt,resnet,classifier,mlp", help="of --passes")
    parser.add_argument("--layers", type=int, default=4, help="of --passes")
    parser.add_argument("--placement", default="2x4", help="of --passes: sizes")
    parser.add_argument("--checks", action="store_true", help="of --passes: the totals, with the checks'")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    names = (
        options.only.split(",")
        if options.only
        else [n for n, m in MUSTS.items() if options.large >= m.is_large]
    )
    unknown = [name for name in names if name not in MUSTS]
    if unknown:
        parser.error(f"no must is called {', '.join(unknown)}; there are {', '.join(MUSTS)}")
    if options.one:
        print(json.dumps(vars(planning_cost(options.one))))
    elif options.passes:
        print_passes(options)
    else:
        print_musts(names, options.rounds)
        if not options.only:
            print("\n| table | command |\n|---|---|")
            print("\n".join(f"| {name} | `{command}` |" for name, command in ELSEWHERE.items()))


if __name__ == "__main__":
    main()
