"""The pages of the algebra are what the rules say, and every op stands on one."""

import re
from collections.abc import Callable, Iterator

import pytest

from sbp.rules import REGISTRY, Row, Rule
from sbp.rules.registry import USER
from sbp.signature import S
from tests.golden.algebra import boxing, pages
from tests.golden.algebra.applications import NEWER, samples
from tests.golden.texts import FOLDER, difference
from tests.rules.claims import WITHOUT_SAMPLE

# Pages are written with a JAX that has all ops; with another the applications of these are left out.
LACKING = frozenset(name for name in NEWER if name not in samples())


def text(blocks: list[str]) -> str:
    return "\n\n".join(blocks) + "\n"


def blocks(family: str) -> list[str]:
    """Those of a golden page."""
    return (FOLDER / "algebra" / f"{family}.txt").read_text(encoding="utf-8").rstrip("\n").split("\n\n")


def names(block: str) -> list[str]:
    """The ops of a section or a block."""
    first = re.split(r":\s|\n(?! )", block.removeprefix("## ").removeprefix(f"{pages.NOT_APPLIED}: "))[0]
    return first.replace(",", " ").split()


@pytest.mark.parametrize("family", pages.families())
def test_page(family: str, request: pytest.FixtureRequest) -> None:
    golden: Callable[[str, str], None] = request.getfixturevalue("golden")
    found, name = pages.page(family), f"algebra/{family}.txt"
    if not any(LACKING & set(names(b)) for b in found):
        golden(name, text(found))
        return
    if request.config.getoption("--update-golden"):
        pytest.skip(f"this JAX has no {', '.join(sorted(LACKING))}: write the page with a newer one")
    known = [b for b in blocks(family) if b.startswith("## ") or not set(names(b)) <= LACKING]
    changed = difference(name, text(known), text(found))
    assert not changed, changed


def test_boxing(golden: Callable[[str, str], None]) -> None:
    golden("algebra/boxing.txt", text(boxing.page()))


def test_every_op_stands_on_a_page() -> None:
    for family in pages.families():
        ops = {r.name for r in REGISTRY.values() if r.family == family}
        heads = [b for b in blocks(family) if b.startswith("## ")]
        applied = {n for b in blocks(family) if "\n    over " in b for n in names(b)}
        told = {n for b in blocks(family) if b.startswith(pages.NOT_APPLIED) for n in names(b)}
        assert {n for b in heads for n in names(b)} == ops
        assert ops <= applied | told
        assert told <= set(WITHOUT_SAMPLE) and not told & applied


def test_no_page_is_left_over() -> None:
    found = {path.stem for path in (FOLDER / "algebra").glob("*.txt")}
    assert found == {*pages.families(), "boxing"}


def test_pages_are_narrow_and_plain() -> None:
    for path in (FOLDER / "algebra").glob("*.txt"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert max(map(len, lines)) <= 110, path.name
        assert not [line for line in lines if line != line.rstrip() or not line.isascii()], path.name


@pytest.fixture
def lie(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rule that says something else."""
    row = Row((S(0),), (S(0),), moves=True)
    monkeypatch.setitem(REGISTRY, "tanh", Rule("tanh", lambda op: [row], family="elementwise"))
    yield


@pytest.mark.usefixtures("lie")
def test_the_check_itself() -> None:
    changed = difference(
        "algebra/elementwise.txt", text(blocks("elementwise")), text(pages.page("elementwise"))
    )
    assert "+## tanh" in changed and "bit for bit" in changed


def test_rules_of_users_have_no_page() -> None:
    assert USER not in pages.families()
