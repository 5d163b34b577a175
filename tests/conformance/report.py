"""Results as lines of JSON, and the report by group."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tests.conformance.harnesses import FAILED, STATUSES, Result


def to_line(result: Result) -> str:
    """One result as one line."""
    return json.dumps(asdict(result))


def from_line(line: str) -> Result:
    """The opposite of `to_line`."""
    fields = json.loads(line)
    return Result(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


def read(path: Path) -> dict[str, Result]:
    """The last result of every case in a file; a last line that was cut off is ignored."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            result = from_line(line)
        except json.JSONDecodeError:
            continue
        found[result.name] = result
    return found


def report(results: Iterable[Result], title: str) -> str:
    """The report in Markdown: a row per group, then every failure with its message."""
    results = sorted(results, key=lambda r: r.name)
    groups: dict[str, list[Result]] = {}
    for r in results:
        groups.setdefault(r.group, []).append(r)
    lines = [f"# {title}", "", _totals(results), ""]
    lines += ["| group | cases | " + " | ".join(STATUSES) + " | ops that also ran whole |"]
    lines += ["|---|" + "---|" * (len(STATUSES) + 2)]
    lines += [_row(group, found) for group, found in sorted(groups.items())]
    failures = [r for r in results if r.status == FAILED]
    lines += ["", f"## Failed: {len(failures)}", ""]
    lines += [line for r in failures for line in _failure(r)] or ["None."]
    return "\n".join(lines) + "\n"


def _totals(results: Sequence[Result]) -> str:
    counts = Counter(r.status for r in results)
    said = ", ".join(f"{counts[s]} {s}" for s in STATUSES)
    return f"{len(results)} cases in {sum(r.seconds for r in results) / 60:.1f} minutes: {said}."


def _row(group: str, results: Sequence[Result]) -> str:
    """A group; of the ops that ran whole, in how many cases."""
    counts = Counter(r.status for r in results)
    whole = Counter(op for r in results for op in r.whole)
    ops = ", ".join(f"{op} ({n})" for op, n in sorted(whole.items()))
    cells = [group, len(results), *(counts[s] or "" for s in STATUSES), ops]
    return "| " + " | ".join(map(str, cells)) + " |"


def _failure(r: Result) -> list[str]:
    signatures = ", ".join(r.in_sbp)
    drawn = f"attempt {r.attempt}, {r.hierarchy}, {r.hardware}, in_sbp ({signatures})" if r.hierarchy else ""
    text = " ".join(r.message.split())
    return [f"- `{r.name}`", *([f"  - {drawn}"] if drawn else []), f"  - {text}"]
