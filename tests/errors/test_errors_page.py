"""Messages about sources, measured steps, checkpoints, processes and training are on the page, and tested."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    *(f"runtime/{room}" for room in ("source", "profile", "checkpoint", "processes", "training")),
    "runtime/embedding/tiers",
    "sbp/rules/shards.py",
)
MAKERS = ("Problem", "_problem", "problem")
"""What a message is made with."""
WORDS, BEGINNING = 3, 28
"""Words of a text that says enough to be found, and characters that are looked for."""


def functions(room: str) -> Iterator[tuple[str, list[str]]]:
    """The functions of a room that make a message, each with the texts in it."""
    place = ROOT / room
    for path in sorted(place.glob("*.py")) if place.is_dir() else [place]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(map(makes, ast.walk(node))):
                inner = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node]
                if not any(makes(x) for n in inner for x in ast.walk(n)):
                    yield f"{path.relative_to(ROOT)}: {node.name}", texts(node)


def makes(node: ast.AST) -> bool:
    """Whether a call makes a message."""
    if not isinstance(node, ast.Call):
        return False
    return getattr(node.func, "id", getattr(node.func, "attr", "")) in MAKERS


def texts(function: ast.FunctionDef) -> list[str]:
    """The texts of a function of a few words, its docstring apart."""
    doc = ast.get_docstring(function, clean=False)
    found = [n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [t for t in found if t != doc and len(t.split()) >= WORDS]


def plain(text: str) -> str:
    """A text as it is read: without escapes, breaks of lines and quotes between its parts."""
    text = re.sub(r'"\s*\n\s*r?f?"', "", text.replace("\\", ""))
    return re.sub(r"\s+", " ", text)


@cache
def read(*paths: Path) -> str:
    """Some files as one text."""
    return plain(" ".join(p.read_text(encoding="utf-8") for p in paths))


FOUND = [pytest.param(said, id=name) for room in ROOMS for name, said in functions(room) if said]


def says(where: str, said: list[str]) -> bool:
    """Whether one of the texts of a message is there."""
    return any(plain(t).strip()[:BEGINNING] in where for t in said)


@pytest.mark.parametrize("said", FOUND)
def test_a_message_is_on_the_page(said: list[str]) -> None:
    assert says(read(ROOT / "docs" / "errors.md"), said), f"docs/errors.md says none of {said}"


@pytest.mark.parametrize("said", FOUND)
def test_a_message_is_tested(said: list[str]) -> None:
    tests = sorted(p for p in (ROOT / "tests").rglob("*.py") if p != Path(__file__))
    assert says(read(*tests), said), f"no test says any of {said}"


def test_messages_are_found() -> None:
    assert len(FOUND) > 12
    assert not says("what no message says", ["something that is said nowhere"])
