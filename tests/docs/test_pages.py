"""The pages tell the truth: their Python runs, and prints what they say."""

import doctest
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

import sbp

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"sbp_docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


pages = script("pages")
PAGES = pages.pages()


@pytest.fixture(autouse=True)
def clean_caches() -> Iterator[None]:
    """A page ends with programs and arrays that nobody needs any more."""
    yield
    jax.clear_caches()


@pytest.mark.some(1, "docs/source.md")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_a_page_prints_what_it_says(page: Path) -> None:
    found = pages.blocks(page.read_text(encoding="utf-8"))
    shown = [pages.without_estimates(block.shown) for block in found if block.kind]
    printed = zip(found, pages.run(page)[0], strict=True)
    got = [pages.without_estimates(text) for block, text in printed if block.kind]
    # Pages are printed with the newest JAX. Older ones run them, but some derivatives have other ops there.
    is_older = jax.__version_info__ < (0, 12)
    assert got == shown or is_older, f"run `python docs/pages.py {page.relative_to(ROOT)}`"


def test_the_index_leads_to_every_page() -> None:
    """The site refuses a page that no list names."""
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w/]+\.md)", (docs / "index.md").read_text(encoding="utf-8")))
    pages_there = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert {name for name in pages_there if not name.startswith(("notes/", "site/"))} - {"index.md"} <= linked


def test_every_block_of_python_is_run_or_marked() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        python = [block for block in pages.blocks(text) if block.language == "python"]
        marked = text.count("<!-- not run -->\n```python\n")
        assert len(re.findall(r"^```python$", text, re.MULTILINE)) == len(python) + marked, page.name
        shown = sum(block.kind != "" for block in pages.blocks(text))
        assert len(re.findall(r"^<!-- (?:prints|raises) -->$", text, re.MULTILINE)) == shown, page.name


def test_estimates_are_not_compared() -> None:
    text = "wire  229 kB\ntime  1.98 ms per step, estimated; 3 us\n"
    assert pages.without_estimates(text) == "wire  229 kB\ntime  # ms per step, estimated; # us"


def test_the_example_sets_up_its_devices() -> None:
    """The tests leave that line out, since their devices are there already."""
    for page in PAGES:
        code = "".join(block.code for block in pages.blocks(page.read_text(encoding="utf-8")))
        assert pages.DEVICES in code or 'placement("cpu"' not in code, page.name


def test_the_readme_example_runs_as_typed(tmp_path: Path) -> None:
    """In a process of its own, with its own devices, and it prints what the README shows."""
    example, *_ = pages.blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    file = tmp_path / "train.py"
    file.write_text(example.code, encoding="utf-8")
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_ENABLE_X64")}
    run = [sys.executable, str(file)]
    env |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert pages.without_estimates(got) == pages.without_estimates(example.shown)


def test_the_check_itself(tmp_path: Path) -> None:
    page = tmp_path / "liar.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n<!-- prints -->\n```text\n3\n```\n", encoding="utf-8")
    (block,) = pages.blocks(page.read_text(encoding="utf-8"))
    assert (block.shown, pages.run(page)[0]) == ("3\n", ["2\n"])
    assert "```text\n2\n```" in pages.refreshed(page)
    page.write_text("```python\n1 + 1\n```\n\n<!-- raises -->\n```text\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="said to raise"):
        pages.run(page)


def test_the_table_of_ops_is_up_to_date() -> None:
    make_ops = script("make_ops")
    table = (ROOT / "docs" / "ops.md").read_text(encoding="utf-8")
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    made = make_ops.lines()
    stale = [name for name in made if "| no sample |" not in made[name] and made[name] != rows.get(name)]
    assert not stale, "run `python docs/make_ops.py` with the newest JAX that is supported"
    assert rows.keys() == made.keys()
    assert "\n".join(make_ops.without()) in table
    titles = [line for line in table.splitlines() if line.startswith("## ")]
    made_lines = "\n".join(make_ops.page(table)).splitlines()
    assert titles == [line for line in made_lines if line.startswith("## ")]


def test_what_may_differ_is_up_to_date() -> None:
    """The table of odd values on the page of concepts comes from the rules."""
    make_ops = script("make_ops")
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert make_ops.with_odd_values(page, make_ops.odd_values()) == page, "run `python docs/make_ops.py`"


def test_the_reference_has_all_public_names() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    there = set(re.findall(r":: sbp\.(?:\w+\.)?(\w+)$", page, re.MULTILINE))
    signatures = {"AUTO", "B", "P", "S", "embedding"}  # the classes of the first stand there
    assert {*sbp.__all__} - there <= signatures
    moved = [new for new in sbp._MOVED.values() if not new.startswith(("sbp.passes", "sbp.runtime"))]
    assert {new.rpartition(".")[2] for new in moved} <= there


def test_what_the_site_adds_to_a_page() -> None:
    """Without an address of the sources, links to files that are no pages are their words alone."""
    conf = script("site/conf")
    assert doctest.testmod(conf).failed == 0
    text = conf.addressed(ROOT / "docs" / "index.md", "[the view](../sbp/view.py) and [why](why.md#a)", None)
    assert text == "the view and [why](why.md#a)"
