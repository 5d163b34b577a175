"""Runs JAX's harnesses on eight devices: `python -m tests.conformance [--groups a,b] [--names REGEX] ...`."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jax

from tests.conformance import report
from tests.conformance.harnesses import FAILED, STATUSES, Case, all_cases
from tests.conformance.worker import run_all, set_environment


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("python -m tests.conformance", description=__doc__)
    p.add_argument("--shard", default="0/1", help="i/n: every n-th case, from the i-th")
    p.add_argument("--groups", default="", help="names of groups, separated by commas")
    p.add_argument("--names", default="", help="a regular expression that a case's name contains")
    p.add_argument("--resume", type=Path, help="the file of results: cases in it are not run again")
    p.add_argument("--again", action="store_true", help="cases that failed are run again all the same")
    p.add_argument("--report", type=Path, help="where the report is written, in Markdown")
    p.add_argument("--workers", type=int, default=1, help="processes that share the cases")
    p.add_argument("--limit", type=float, default=180.0, help="seconds that one case may take")
    return p


def choose(cases: Sequence[Case], shard: str, groups: str, names: str) -> list[Case]:
    """The cases that the options name."""
    first, step = map(int, shard.split("/"))
    wanted = set(filter(None, groups.split(",")))
    found = [c for c in cases if (not wanted or c.group in wanted) and re.search(names, c.name)]
    return found[first::step]


def main(argv: Sequence[str]) -> int:
    """Runs the chosen cases; 1 if one failed."""
    options = parser().parse_args(argv)
    set_environment()
    cases = choose(all_cases(), options.shard, options.groups, options.names)
    known = report.read(options.resume) if options.resume else {}
    if options.again:
        known = {name: r for name, r in known.items() if r.status != FAILED}
    left = [c for c in cases if c.name not in known]
    print(f"{len(cases)} cases, {len(cases) - len(left)} done before", flush=True)
    start, counts = time.perf_counter(), Counter[str]()
    for i, result in enumerate(run_all(left, options.workers, options.limit), 1):
        known[result.name] = result
        counts[result.status] += 1
        if options.resume:
            with options.resume.open("a", encoding="utf-8") as file:
                file.write(report.to_line(result) + "\n")
        if result.status == FAILED:
            print(f"FAILED {result.name}\n  {result.message[:300]}", flush=True)
        if i % 50 == 0:
            said = ", ".join(f"{counts[s]} {s}" for s in STATUSES if counts[s])
            print(f"{i} of {len(left)} after {time.perf_counter() - start:.0f} s: {said}", flush=True)
    found = [known[c.name] for c in cases if c.name in known]
    text = report.report(found, f"JAX's harnesses on eight devices, jax {jax.__version__}")
    if options.report:
        options.report.write_text(text, encoding="utf-8")
    print(text.splitlines()[2])
    return int(any(r.status == FAILED for r in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
