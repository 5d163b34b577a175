"""Names that have gone (docs/decisions/0023_names.md) do not come back."""

import ast
import re
from collections import Counter

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


NOUNS_AND_VERBS = frozenset("boxing bring feed heading mapping need setting sharding timing".split())
PARTICIPLES_AND_ADVERBS = frozenset(
    """ahead alone apart around begun behind below beside between beyond bound brought built done drawn early
    elsewhere felt found given gone held here hidden inside kept known laid later left lost made meant met
    near once outside paid said seen sent shown soon taken there thrown together told written""".split()
)
# Of rules: "an increasing function". Of a field of another class of the same use: `traced`.
ADJECTIVES = frozenset("increasing decreasing unchanged negated ordered joined traced".split())
# Fields that are nouns, and words of JAX and of XLA; `given` of a module, `started` in files of leases.
FIELDS = frozenset("aliased bound donated given hidden padding recomputed ring seed started".split())


def is_bare(word: str) -> bool:
    """Whether a name is a participle or an adverb that stands alone."""
    ends = word.endswith(("ed", "ing")) and "_" not in word and word not in NOUNS_AND_VERBS
    return (ends or word in PARTICIPLES_AND_ADVERBS) and word not in ADJECTIVES


def is_adjective(field: ast.AnnAssign) -> bool:
    """Whether a field says yes or no: its name may be what it says."""
    return ast.unparse(field.annotation).startswith("bool")


def test_no_public_function_is_a_bare_participle_or_adverb() -> None:
    assert is_bare("held") and is_bare("merged") and not is_bare("merge") and not is_bare("merged_rows")
    found = list[str]()
    for path in MODULES:
        tree = ast.parse(text(path))
        classes = [c for c in ast.walk(tree) if isinstance(c, ast.ClassDef)]
        found += [
            f"{name(path)}: {f.name}"
            for holder in (tree, *classes)
            for f in holder.body
            if isinstance(f, ast.FunctionDef) and is_bare(f.name)
        ]
    assert not found


def test_no_field_of_a_public_class_is_a_bare_participle_or_adverb() -> None:
    """Such as `kept: int`: of what, and in which unit? `fused: bool` says enough."""
    found = [
        f"{name(path)}: {cls.name}.{field.target.id}"
        for path in MODULES
        for cls in nodes(text(path))
        if isinstance(cls, ast.ClassDef) and not cls.name.startswith("_")
        for field in cls.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if is_bare(field.target.id) and field.target.id not in FIELDS and not is_adjective(field)
    ]
    assert not found


def names_given(body: list[ast.stmt]) -> list[str]:
    """What statements of a module or a class define, but for overloads."""
    found = list[str]()
    for statement in body:
        match statement:
            case ast.Assign(targets=targets):
                found += [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=word), value=ast.expr()):
                found.append(word)
            case ast.FunctionDef(name=word, decorator_list=[]) | ast.ClassDef(name=word):
                found.append(word)
    return found


def test_a_name_is_given_once() -> None:
    """A constant under a name that another one has takes its place everywhere."""
    again = ast.parse("A = 1\nB: int\nB = 2\nA, C = 3, 4\n").body
    assert sorted(names_given(again)) == ["A", "A", "B", "C"]
    found = {
        (name(path), word): times
        for path in MODULES
        for holder in nodes(text(path))
        if isinstance(holder, ast.Module | ast.ClassDef)
        for word, times in Counter(names_given(holder.body)).items()
        if times > 1
    }
    assert not found
