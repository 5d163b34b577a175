"""Runs the Python of the pages, and writes what each block prints below it.

    python docs/pages.py [PAGE ...]

A page's ```python blocks are one program, run from top to bottom as if saved under the page's name, so that a
line of `data_parallel.md` is `data_parallel.py:12`. What a block prints follows it as

    <!-- prints -->           or   <!-- raises -->    for the error that it ends with
    ```text
    ...
    ```

and this script keeps that true. A block after `<!-- not run -->` is shown only. A ```sh block that is said to
print is run too: lines of `python -m sbp`, beside the file that the page's Python makes.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
_ESTIMATE = re.compile(r"\bestimated\b|\bat the peak\b|\bx the time\b")
_TIME = re.compile(r"\b\d+(\.\d+)? (us|ms|s)\b")
_BLOCK = re.compile(
    r"(?P<skip><!-- not run -->\n)?^```(?P<language>python|sh)\n(?P<code>.*?)^```\n"
    r"(?:\n<!-- (?P<kind>prints|raises) -->\n```text\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code with what the page says it prints; `span` is where it stands in the page's text."""

    language: str
    code: str
    kind: str
    shown: str
    span: tuple[int, int]


def pages() -> list[Path]:
    """The pages that have code to run."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if blocks(page.read_text(encoding="utf-8"))]


def blocks(text: str) -> list[Block]:
    """The blocks of a page that are run."""
    return [
        Block(m["language"], m["code"], m["kind"] or "", m["shown"] or "", m.span())
        for m in _BLOCK.finditer(text)
        if not m["skip"] and (m["language"] == "python" or m["kind"])
    ]


def without_estimates(text: str) -> str:
    """A page's output without estimated times and memory: versions of JAX spell some ops otherwise."""
    return "\n".join(map(_without_estimates, text.splitlines()))


def _without_estimates(line: str) -> str:
    if _ESTIMATE.search(line):
        return re.sub(r"\d+(\.\d+)?", "#", line)
    # Columns are as wide as their figures.
    return re.sub(r" +", " ", _TIME.sub("# s", line)) if _TIME.search(line) else line


def program_name(page: Path) -> str:
    """The file that a page's Python would be saved as."""
    return "train.py" if page.name == "README.md" else f"{page.stem}.py"


def run(page: Path, count: int | None = None) -> tuple[list[str], dict[str, Any]]:
    """What each block of a page (the first `count`, or all) prints or raises, and the names that they define.

    The number of devices can be set once per process only, so the line that sets it is left out here.

    Raises:
      AssertionError: if a block that is said to raise does not.
    """
    found = blocks(page.read_text(encoding="utf-8"))[:count]
    name = program_name(page)
    whole = "".join(block.code for block in found if block.language == "python").replace(DEVICES, "")
    linecache.cache[name] = (len(whole), None, whole.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, first = [], 0
    with _own_rules():
        for block in found:
            if block.language == "sh":
                printed.append(_command_lines(block.code, name, whole))
                continue
            code = compile("\n" * first + block.code.replace(DEVICES, ""), name, "exec")
            first += block.code.count("\n")
            printed.append(_output(code, names, raises=block.kind == "raises"))
    return printed, names


def _output(code: Any, names: dict[str, Any], *, raises: bool) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        if raises:
            try:
                exec(code, names)
            except Exception as e:
                return f"{type(e).__name__}: {_plain(str(e))}"
            raise AssertionError("this block is said to raise")
        exec(code, names)
    return _plain(out.getvalue())


def _command_lines(text: str, file: str, code: str) -> str:
    """What `python -m sbp ...` prints, line by line, in a folder that has the page's program."""
    from sbp.__main__ import main as sbp_main

    out = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(out):
        Path(file).write_text(code, encoding="utf-8")
        for line in text.splitlines():
            command = shlex.split(line)
            assert command[:3] == ["python", "-m", "sbp"], line
            assert sbp_main(command[3:]) == 0, line
    return _plain(out.getvalue())


def _plain(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").split("\n")) if text.strip() else ""


@contextlib.contextmanager
def _own_rules() -> Iterator[None]:
    """A page may register rules; the next one does not see them."""
    from sbp.rules import REGISTRY

    before = dict(REGISTRY)
    try:
        yield
    finally:
        REGISTRY.clear()
        REGISTRY.update(before)


def refreshed(page: Path) -> str:
    """The page's text with what its blocks print now."""
    text = page.read_text(encoding="utf-8")
    found = blocks(text)
    for block, printed in reversed(list(zip(found, run(page)[0], strict=True))):
        if block.kind:
            shown = f"\n<!-- {block.kind} -->\n```text\n{printed}```\n"
            start, end = block.span
            text = f"{text[:start]}```{block.language}\n{block.code}```\n{shown}{text[end:]}"
    return text


def main(argv: Sequence[str]) -> None:
    """Rewrites the pages given, or all."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    for page in [Path(a).resolve() for a in argv] or pages():
        sys.stderr.write(f"{page.relative_to(ROOT)}\n")
        page.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1:])
