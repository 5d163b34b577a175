"""The site of these pages, by Sphinx: `python -m sphinx -W -c docs/site docs out/site`.

The pages are plain Markdown that reads well on a forge too. What a site needs more is added while they are
read: the navigation, from the lists of index.md, and addresses for links to files that are no pages.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Where the sources are published, if .ci/addresses has said it.
SOURCE = SETTINGS.get("urls", {}).get("Source")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")
PAGES = re.compile(r"\]\(([\w/]+)\.md\)")

project, author, copyright = "sbp", "the sbp authors", "the sbp authors"
release = version = SETTINGS["version"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["notes", "site"]
html_theme = "furo"
html_title = f"sbp {release}"
html_static_path = ["style"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
highlight_language = "text"
autodoc_typehints = "none"  # signatures and "Arguments" say it
autodoc_member_order = "bysource"
napoleon_use_rtype = False


def navigation(index: str) -> str:
    """The tables of contents that the lists of index.md are, hidden in the page and shown beside all.

    >>> print(navigation("# T\\n\\n## Learn\\n\\n- [A](a.md), [B](b/c.md)\\n"))
    ```{toctree}
    :hidden:
    :caption: Learn
    <BLANKLINE>
    a
    b/c
    ```
    """
    made, seen = [], set()
    for part in index.split("\n## ")[1:]:
        pages = [page for page in PAGES.findall(part) if page not in seen]
        seen.update(pages)
        head = f"```{{toctree}}\n:hidden:\n:caption: {part.splitlines()[0]}\n\n"
        made += [head + "\n".join(pages) + "\n```"] if pages else []
    return "\n\n".join(made)


def addressed(page: Path, text: str, source: str | None) -> str:
    """A page with the addresses of files that are not on the site; without an address, their names alone.

    >>> addressed(DOCS / "index.md", "[code](../sbp/view.py), [more](page.md#a)", "https://forge.example/sbp")
    '[code](https://forge.example/sbp/blob/main/sbp/view.py), [more](page.md#a)'
    """

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found[1], (page.parent / found[2]).resolve(), found[3] or ""
        if path.is_relative_to(DOCS) and path.is_file():
            return found[0]
        if source is None:
            return words
        return f"[{words}]({source}/blob/main/{path.relative_to(ROOT).as_posix()}{anchor})"

    return LINK.sub(link, text)


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Adds to a page what it needs on the site."""
    path = Path(app.srcdir) / f"{name}.md"
    source[0] = addressed(path, source[0], SOURCE)
    if name == root_doc:
        source[0] += "\n\n" + navigation(source[0])


def spelled(paragraph: str) -> str:
    """A paragraph of a docstring as reStructuredText: its code as such, and no emphasis.

    >>> spelled("`x`s of `a * b`, and opt/*")
    '``x``\\\\ s of ``a * b``, and opt/\\\\*'
    """
    if paragraph.lstrip().startswith(">>>"):
        return paragraph
    parts = paragraph.split("`")
    for i in range(0, len(parts), 2):  # what is no code
        parts[i] = parts[i].replace("*", "\\*")
        if i and parts[i][:1].isalnum():
            parts[i] = "\\ " + parts[i]
    return "``".join(parts)


def respell(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Docstrings are for readers of code; here they become what Sphinx reads."""
    lines[:] = "\n\n".join(map(spelled, "\n".join(lines).split("\n\n"))).split("\n")


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", respell, priority=100)
