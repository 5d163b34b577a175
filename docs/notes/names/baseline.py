"""What must stay while names and folders change: plans, programs, and the count of statements.

    python docs/notes/names/baseline.py            compares with the JSON files beside it
    python docs/notes/names/baseline.py --write    writes them

`programs.json`: the 24 rows of benchmarks.versus_jax, with their plans, collectives, bytes, and a digest
of the program that XLA is given. `statements.json`: statements of code by folder; a docstring is none.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
HERE = Path(__file__).parent


def statements() -> dict[str, int]:
    """Statements of code by folder, and their sum in `sbp`, `passes` and `runtime`."""
    count: Counter[str] = Counter()
    for top in ("sbp", "passes", "runtime", "models"):
        for file in (ROOT / top).rglob("*.py"):
            parts = file.relative_to(ROOT).parts
            nodes = [
                n for n in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(n, ast.stmt)
            ]
            texts = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
            count["/".join(parts[:2]) if len(parts) > 2 else top] += len(nodes) - len(texts)
    inside = sum(n for folder, n in count.items() if not folder.startswith("models"))
    return {**dict(sorted(count.items())), "sbp + passes + runtime": inside}


def programs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each benchmark program: its plan in figures, and the digest of what XLA is given."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import sbp
    from benchmarks.cases import CASES
    from benchmarks.versus_jax import ROWS, parse

    options = sbp.Options(time_limit=math.inf, cache=False)
    for row in ROWS.split(","):
        model, layers, choice, shape = parse(row)
        case = CASES[model](choice, shape, layers)
        placement = sbp.placement("cpu", shape=shape)
        program = sbp.compile(
            case.step, placement, in_sbp=case.in_sbp, donate_argnums=(0, 1), options=options
        )
        plan = program.plan(*case.shapes())
        text = program.lower(*case.shapes()).as_text()
        yield (
            row,
            {
                "in": " ".join(map(str, plan.in_sbp)),
                "out": " ".join(map(str, plan.out_sbp)),
                "collectives": [  # in the order in which they run
                    f"{c.kind} {c.tensor} {c.shape} {c.dtype} {c.before}->{c.after} {c.axes} x{c.count}"
                    f" {c.wire_bytes:.0f}"
                    for c in plan.collectives
                ],
                "wire_bytes": plan.wire_bytes,
                "memory_bytes": plan.memory_bytes,
                "seconds": plan.seconds,
                "step_seconds": plan.step_seconds,
                "program": hashlib.sha256(text.encode()).hexdigest()[:16],
            },
        )


def main() -> int:
    """Compares, or writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    made = {"statements.json": statements(), "programs.json": dict(programs())}
    if write:
        for name, data in made.items():
            (HERE / name).write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")
        return 0
    now, then = made["statements.json"], json.loads((HERE / "statements.json").read_text(encoding="utf-8"))
    total = "sbp + passes + runtime"
    sys.stdout.write(f"statements: {then[total]} -> {now[total]}, {now[total] / then[total] - 1:+.1%}\n")
    saved = json.loads((HERE / "programs.json").read_text(encoding="utf-8"))
    again = json.loads(json.dumps(made["programs.json"]))
    differ = [f"{row}: {key}" for row in saved for key in saved[row] if saved[row][key] != again[row][key]]
    sys.stdout.write("".join(f"{d}\n" for d in differ) or f"{len(saved)} programs are equal\n")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
