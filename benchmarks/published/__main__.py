"""`python -m benchmarks.published STEPS.csv`: the table of published steps, estimated and measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.figures import head, line, summary
from benchmarks.published.many import outcomes
from benchmarks.published.rows import PublishedStep, RowError, read


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table and the figures."""
    parser = argparse.ArgumentParser("benchmarks.published", description=__doc__)
    parser.add_argument("steps", type=Path, help="the CSV of published steps")
    parser.add_argument("--rows", help="numbers of rows, from 1, with commas between; default: all")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    wanted = {int(n) for n in args.rows.split(",")} if args.rows else None
    rows = [x for i, x in enumerate(read(args.steps), 1) if wanted is None or i in wanted]
    for error in rows:
        if isinstance(error, RowError):
            print(error)
    print(head())
    found = []
    for x in outcomes([x for x in rows if isinstance(x, PublishedStep)], args.processes):
        found.append(x)
        print(line(x), flush=True)
    print(f"\n{summary(found)}")
    if args.out:
        args.out.write_text(json.dumps([x.as_data() for x in found], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
