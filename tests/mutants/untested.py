"""What has no test in the default suite: rules, messages, schedules, public names.

`python -m tests.mutants.untested [--full]` runs the suite once and prints what it lacks.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import sbp
from sbp.passes.schedule.orders import GENERATORS
from sbp.rules import REGISTRY
from sbp.rules.registry import USER
from tests.errors import test_errors_page as page
from tests.mutants.reach import ROOT, messages
from tests.mutants.run import copy_to, pytest_in, reaching
from tests.rules.claims import WITHOUT_SAMPLE

# Made where one of several processes speaks, which are not traced: their texts are looked for instead.
ELSEWHERE = ("runtime/processes/", "runtime/arrays/", "runtime/checkpoint/", "runtime/storage/")


def texts_of_tests() -> str:
    return page.read(*sorted((ROOT / "tests").rglob("*.py")))


def unmade(reached: dict[str, list[str]]) -> Iterator[str]:
    """Messages that no test makes."""
    for file, line in messages():
        if not reached.get(f"{file}:{line}") and not file.startswith(ELSEWHERE):
            yield f"message at {file}:{line}"


def unnamed(collected: str) -> Iterator[str]:
    """Rules and schedules that no name of a test has, and public names that no test writes."""
    for name, rule in REGISTRY.items():
        if rule.family != USER and name not in WITHOUT_SAMPLE and f"[{name}-" not in collected:
            yield f"rule {name}"
    yield from (f"schedule {name}" for name in GENERATORS if name not in collected)
    tests = texts_of_tests()
    for name in sbp.__all__:
        if not re.search(rf"\bsbp\.{name}\b|import [\w, (]*\b{name}\b", tests):
            yield f"public name sbp.{name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full suite, not the default one")
    suite = ["--full"] if parser.parse_args().full else []
    with tempfile.TemporaryDirectory() as folder:
        tree: Path = copy_to(folder)
        reached, collected = reaching(tree, *suite), pytest_in(tree, "--collect-only", *suite).stdout
    lacking = [*unmade(reached), *unnamed(collected)]
    print("\n".join(lacking) or "nothing")
    sys.exit(bool(lacking))


if __name__ == "__main__":
    main()
