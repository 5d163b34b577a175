"""Names that have gone (docs/decisions/0023_names.md) do not come back."""

import ast
import re

from tests.test_house import MODULES, ROOT, name, nodes, text

PAGE = (ROOT / "docs" / "decisions" / "0023_names.md").read_text(encoding="utf-8")


def old_names(head: str) -> list[str]:
    """The first column of the table with that head."""
    table = PAGE.split(f"| {head} | now |\n|---|---|\n")[1].split("\n\n")[0]
    return re.findall(r"^\| `([^`]+)`", table, re.MULTILINE)


def test_the_page_has_the_tables() -> None:
    assert {"runtime/said.py", "runtime/processes/late.py", "sbp/talk/"} <= {*old_names("folder or module")}
    assert {"Lookout", "Station"} <= {*old_names("class")} and "patient=" in old_names("option or attribute")


def test_no_folder_and_no_module_has_an_old_name() -> None:
    assert not [old for old in old_names("folder or module") if (ROOT / old).exists()]


def test_no_class_has_an_old_name() -> None:
    old = {*old_names("class")}
    found = {n.name: name(p) for p in MODULES for n in nodes(text(p)) if isinstance(n, ast.ClassDef)}
    assert not {cls: at for cls, at in found.items() if cls in old}


def test_no_option_and_no_attribute_has_an_old_name() -> None:
    old = {word.strip("=").split(".")[-1] for word in old_names("option or attribute")}
    found = {}
    for path in MODULES:
        for node in nodes(text(path)):
            match node:
                case ast.arg(arg=word) | ast.keyword(arg=str(word)) | ast.FunctionDef(name=word):
                    found[word] = name(path)
                case ast.AnnAssign(target=ast.Name(id=word)) | ast.Attribute(attr=word):
                    found[word] = name(path)
    assert not {word: at for word, at in found.items() if word in old}
