"""The rules that hold the house up: who may import whom, how long a file may be, what a text may refer to."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[1]

# Folder -> the name its modules are imported by. A layer may import itself and what stands above it here.
LAYERS = {"sbp": "sbp", "passes": "sbp.passes", "runtime": "sbp.runtime", "models": "models"}
ORDER = list(LAYERS.values())

# The lazy face and the command line reach every layer; nobody inside the house imports them.
FACE = ("sbp/__init__.py", "sbp/__main__.py")
# The only modules that touch what JAX keeps for itself.
COMPAT = tuple(f"sbp/compat/{path.name}" for path in sorted((ROOT / "sbp" / "compat").glob("*.py")))
XLA_STATUS = re.compile("RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|DATA_LOSS")
MAX_LINES = 400

# The folders of each layer in the order of the work: each may import those before it. In `sbp` the loose
# files, which a user writes against, stand between them.
FOLDERS = {
    "sbp": "text compat rates hardware notation communication rules checker commandline".split(),
    "sbp.passes": "program rows boxing plan physical schedule explain search pipeline render replan".split(),
    "sbp.runtime": (
        "hlo target processes storage cache call lower nan_checks execute pipeline source saved profile "
        "report compile ahead_of_time program diagnose constraints search calibrate embedding arrays "
        "checkpoint training"
    ).split(),
}
# `spec` and `request` belong to the chain; `face` and `chain` stand at the top and see all.
TOP = ("request", "spec", "recall", "face", "pass_manager", "chain")
# Folders that stand above these.
ABOVE = ("replan",)
LOOSE = {"sbp": 12, "passes": 8, "runtime": 1}
"""How many files may stand beside the folders: what a user writes against, and an `__init__`."""

TEXTS = ("*.md", "*.py", "*.toml", "*.yml", "*.yaml", "*.json", "*.html", "*.svg", "*.dot", "*.txt", "*.sh")
# What only exists on the machine of whoever wrote it.
FOREIGN = {
    "a folder beside the repository": re.compile(r"\.\./shared\b"),
    "an absolute path of somebody's machine": re.compile(r"(?<![\w./-])/(?:root|home|work|Users)/\w"),
    "a file that is not in the repository": re.compile(r"\b(?:DESIGN|FACTS)\.md\b|\bstudy/[\w-]+\.md\b"),
}

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
# The names of the file that a link names and of the one to which it leads.
FILE_LINK = re.compile(r"\[(?:[\w/]+/)?(\w+\.py)\]\((?:[\w./]+/)?(\w+\.py)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


def files(folder: str, pattern: str) -> Iterator[Path]:
    """The files below a top-level folder, not through the two links, no caches and no build products."""
    for path in sorted((ROOT / folder).rglob(pattern)):
        parts = path.relative_to(ROOT).parts
        linked = parts[:2] in (("sbp", "passes"), ("sbp", "runtime"))
        if path.is_file() and not linked and not any(p.startswith(".") or p == "__pycache__" for p in parts):
            yield path


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Every node of a module, the module first; each file is parsed once for all tests."""
    return tuple(ast.walk(ast.parse(source)))


def docstring(path: Path) -> str | None:
    module = nodes(text(path))[0]
    assert isinstance(module, ast.Module)
    return ast.get_docstring(module)


MODULES = [path for folder in LAYERS for path in files(folder, "*.py")]
DOCUMENTS = sorted(ROOT.glob("*.md"))
DOCUMENTS += [path for folder in ("docs", "benchmarks", "tests", *LAYERS) for path in files(folder, "*.md")]


def module_name(path: Path) -> str:
    """passes/plan/cost.py -> sbp.passes.plan.cost"""
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([LAYERS[folder], *(part for part in rest if part != "__init__")])


def layer(module: str) -> int | None:
    """The position in ORDER, the longest name first; None for what is not of this house."""
    found = [i for i, root in enumerate(ORDER) if module == root or module.startswith(root + ".")]
    return max(found, default=None)


NAMES = {module_name(path) for path in MODULES}


def imports(path: Path, source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions; `from a import b` is a.b if that is a module."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{origin}.{alias.name}"
                yield node.lineno, inner if inner in NAMES or inner in ORDER else origin


def wrong_imports(path: Path, source: str) -> list[str]:
    """What a module imports against the direction sbp <- passes <- runtime <- models."""
    if name(path) in FACE:
        return []
    own = layer(module_name(path))
    assert own is not None
    wrong = []
    for line, target in imports(path, source):
        at = layer(target)
        if target.split(".")[0] in ("passes", "runtime"):
            wrong.append(f"{name(path)}:{line} imports {target}: say sbp.{target}")
        elif at is not None and at > own:
            wrong.append(f"{name(path)}:{line} imports {target}: {ORDER[own]} may not know {ORDER[at]}")
        elif target in ("sbp", "sbp.__main__") and ORDER[own] != "models":
            wrong.append(f"{name(path)}:{line} imports the public face, not the module that has the name")
    return wrong


def jax_internals(source: str) -> list[int]:
    """The lines that import or reach into `jax._src` or jaxlib, or know texts of XLA's errors."""
    lines = []
    for node in nodes(source):
        match node:
            case ast.Import(names=aliases):
                targets = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str(origin), names=aliases, level=0):
                targets = [f"{origin}.{alias.name}" for alias in aliases]
            case ast.Attribute(value=ast.Name(id="jax"), attr=attribute):
                targets = [f"jax.{attribute}"]
            case ast.Constant(value=str(words)) if XLA_STATUS.search(words):
                targets = ["jaxlib"]
            case _:
                continue
        if any(target.startswith("jax._src") or target.split(".")[0] == "jaxlib" for target in targets):
            lines.append(node.lineno)
    return lines


def test_imports_point_one_way() -> None:
    assert not [wrong for path in MODULES for wrong in wrong_imports(path, text(path))]


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("sbp/view.py", "def f():\n    import sbp.passes.program.graph", "sbp/view.py:2 imports sbp."),
        ("sbp/view.py", "from sbp import runtime", "sbp may not know sbp.runtime"),
        ("sbp/view.py", "from . import passes", "sbp may not know sbp.passes"),
        ("sbp/rules/a.py", "from ..passes import graph", "sbp may not know sbp.passes"),
        ("passes/plan/a.py", "import sbp.runtime.lower.lowering", "sbp.passes may not know sbp.runtime"),
        ("passes/a.py", "from passes.graph import Graph", "say sbp.passes.graph"),
        ("passes/a.py", "import sbp", "imports the public face"),
        ("runtime/a.py", "import models.gpt", "sbp.runtime may not know models"),
        ("runtime/a.py", "from sbp.passes.program.graph import Graph\nfrom . import lower\nimport jax", None),
        ("models/a.py", "import sbp\nfrom sbp import B", None),
        ("sbp/__init__.py", "from sbp.runtime.program.compile import compile", None),
    ],
)
def test_the_import_check_itself(path: str, source: str, complaint: str | None) -> None:
    found = wrong_imports(ROOT / path, source)
    assert complaint in found[0] if complaint else found == []


def house() -> "nx.DiGraph[str]":
    """Who imports whom, inside functions and under TYPE_CHECKING too, without the lazy face and the CLI."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for path in MODULES:
        if name(path) not in FACE:
            graph.add_node(module_name(path))
            targets = {target for _, target in imports(path, text(path))} & NAMES
            graph.add_edges_from((module_name(path), target) for target in targets - {module_name(path)})
    return graph


def circles(graph: "nx.DiGraph[str]") -> list[list[str]]:
    """Modules that import each other."""
    found = nx.strongly_connected_components(graph)
    return [sorted(c) for c in found if len(c) > 1]


def wrong_folders(graph: "nx.DiGraph[str]", package: str) -> list[str]:
    """Imports of a folder from one that stands before it in the order of the work."""
    folders = [folder for folder in FOLDERS[package] if folder not in ABOVE]
    order = {f"{package}.{folder}": i for i, folder in enumerate(folders)}
    order |= {f"{package}.{module}": len(folders) for module in TOP}
    order |= {f"{package}.{folder}": len(folders) + 1 for folder in ABOVE}
    depth = package.count(".") + 2
    at = {m: order[folder] for m in graph for folder in [".".join(m.split(".")[:depth])] if folder in order}
    return [
        f"{a} imports {b}"
        for a, b in graph.edges
        if a in at and b in at and at[a] < at[b] and b != "sbp.passes.request"
    ]


def test_no_circle_of_imports() -> None:
    assert not circles(house())


@pytest.mark.parametrize("package", FOLDERS)
def test_folders_stand_in_the_order_of_the_work(package: str) -> None:
    assert not wrong_folders(house(), package)
    top = package.split(".")[-1]
    parts = [path.relative_to(ROOT / top).parts for path in MODULES if name(path).startswith(f"{top}/")]
    assert {p[0] for p in parts if len(p) > 1} == {*FOLDERS[package]}
    assert top not in LOOSE or sum(len(p) == 1 for p in parts) <= LOOSE[top]


def test_the_circle_check_itself() -> None:
    graph = nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")])
    assert circles(graph) == [["a", "b", "c"]]
    late = nx.DiGraph(
        [("sbp.passes.plan.a", "sbp.passes.render.b"), ("sbp.passes.render.b", "sbp.passes.plan.a")]
    )
    assert wrong_folders(late, "sbp.passes") == ["sbp.passes.plan.a imports sbp.passes.render.b"]


def test_no_module_is_imported_twice() -> None:
    """`passes.x` beside `sbp.passes.x` would be two modules with two of each class."""
    library = [module for module in sorted(NAMES) if module.startswith("sbp") and module != "sbp.__main__"]
    code = "\n".join(
        [
            "import importlib, sys",
            f"for module in {library!r}: importlib.import_module(module)",
            "print([m for m in sys.modules if m.split('.')[0] in ('passes', 'runtime')])",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_the_face_is_light() -> None:
    """`import sbp` takes what a command line can wait for: neither JAX nor a solver."""
    code = "import sys, sbp; print([m for m in ('jax', 'scipy', 'networkx', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_every_folder_says_what_comes_in_and_what_goes_out() -> None:
    for package, folders in FOLDERS.items():
        for folder in folders:
            said = docstring(ROOT / package.split(".")[-1] / folder / "__init__.py") or ""
            assert "In: " in said and "Out: " in said and "Used by" in said.replace("\n", " "), folder


def test_one_name_is_one_idea() -> None:
    """No two modules have a public class, or a name for a type, of the same name."""
    homes: dict[str, list[str]] = {}
    for path in MODULES:
        if name(path).startswith("models/"):
            continue
        for node in ast.iter_child_nodes(nodes(text(path))[0]):
            match node:
                case ast.ClassDef(name=found):
                    pass
                case ast.AnnAssign(target=ast.Name(id=found), annotation=ast.Name(id="TypeAlias")):
                    pass
                case _:
                    continue
            if not found.startswith("_"):
                homes.setdefault(found, []).append(name(path))
    assert not {found: at for found, at in homes.items() if len(at) > 1}


def test_files_are_short() -> None:
    """Longer ones are split by subject."""
    lengths = {name(path): len(text(path).splitlines()) for path in MODULES}
    assert not {file: lines for file, lines in lengths.items() if lines > MAX_LINES}


def test_statements_keep_to_their_budget() -> None:
    """A docstring is no statement of code."""
    every = [node for path in MODULES for node in nodes(text(path)) if isinstance(node, ast.stmt)]
    texts = [node for node in every if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    statements = len(every) - len(texts)
    budget = tomllib.loads(text(ROOT / ".ci" / "budgets.toml"))["statements"]
    assert statements <= budget, f"{statements} statements, {budget} in .ci/budgets.toml"


def test_modules_say_what_they_are() -> None:
    public = [p for p in MODULES if not p.stem.startswith("_") or p.stem in ("__init__", "__main__")]
    assert not [name(path) for path in public if not docstring(path)]


def test_jax_internals_only_in_compat() -> None:
    found = {name(path): jax_internals(text(path)) for path in MODULES if name(path) not in COMPAT}
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import jax._src.core", [1]),
        ("from jax import _src", [1]),
        ("import jax\n\njax._src.core.Tracer", [3]),
        ("from jaxlib import xla_client", [1]),
        ("import jax\nfrom jax.extend import core\njax.jit", []),
        ('x = 1\nis_full = "RESOURCE_EXHAUSTED" in str(e)', [2]),
    ],
)
def test_the_internals_check_itself(source: str, found: list[int]) -> None:
    assert jax_internals(source) == found


def asserts_on_a_clock(source: str) -> list[int]:
    """The lines of assertions that read a clock, or a name that has come from one."""
    clocks = {"monotonic", "perf_counter", "process_time", "time"}

    def reads(node: ast.AST) -> bool:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="time"), attr=attribute)):
                return attribute in clocks
            case _:
                return False

    taken = {
        target.id
        for node in nodes(source)
        if isinstance(node, ast.Assign) and any(map(reads, ast.walk(node.value)))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return [
        node.lineno
        for node in nodes(source)
        if isinstance(node, ast.Assert)
        and any(reads(n) or (isinstance(n, ast.Name) and n.id in taken) for n in ast.walk(node.test))
    ]


def test_no_test_asserts_on_the_clock() -> None:
    """What takes a second here takes a minute on a busy machine."""
    told = [path for path in files("tests", "*.py") if re.search(r"\b(import|from) time\b", text(path))]
    found = {name(path): asserts_on_a_clock(text(path)) for path in told}
    assert found
    assert not {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\nassert time.monotonic() < 3", [2]),
        (
            "import time\nbegan = time.time()\nseconds = time.time() - began\nassert seconds < 1",
            [4],
        ),
        ("assert plan.seconds < 3", []),
    ],
)
def test_the_clock_check_itself(source: str, found: list[int]) -> None:
    assert asserts_on_a_clock(source) == found


@pytest.mark.parametrize("folder", ["passes", "runtime"])
def test_links_are_intact(folder: str) -> None:
    link = ROOT / "sbp" / folder
    assert link.is_symlink(), f"sbp/{folder} must be a link (git config core.symlinks true)"
    assert link.readlink() == Path("..", folder)
    assert (link / "__init__.py").is_file()


def test_every_package_is_importable() -> None:
    """A folder of modules without `__init__.py` is left out of the wheel."""
    for path in MODULES:
        if name(path).split("/")[0] != "models":
            assert (path.parent / "__init__.py").is_file(), f"{name(path.parent)} has no __init__.py"


def test_texts_refer_to_nothing_outside() -> None:
    folders = ("docs", "tests", "benchmarks", *LAYERS)
    texts = [path for pattern in TEXTS for folder in folders for path in files(folder, pattern)]
    texts += [path for pattern in (*TEXTS, ".gitignore", ".ci/*") for path in sorted(ROOT.glob(pattern))]
    found = [
        f"{name(path)}:{number}: {what}"
        for path in texts
        if path != Path(__file__)
        for number, line in enumerate(text(path).splitlines(), 1)
        for what, pattern in FOREIGN.items()
        if pattern.search(line)
    ]
    assert not found


def test_links_of_documents_resolve() -> None:
    dead = []
    for path in DOCUMENTS:
        targets = LINK.findall(FENCE.sub("", text(path)))
        local = [target.split("#")[0] for target in targets if not re.match(r"#|[a-z]+:", target)]
        dead += [f"{name(path)}: {target}" for target in local if not (path.parent / target).exists()]
        dead += [
            f"{name(path)}: {said} for {target}"
            for said, target in FILE_LINK.findall(text(path))
            if said != target
        ]
    assert not dead


@pytest.mark.parametrize("command", ["main_job", "tests"])
def test_ci_runs_what_the_readme_says(command: str) -> None:
    found = re.search(rf'^{command}="(.+)"$', text(ROOT / ".ci" / "run"), re.MULTILINE)
    assert found
    assert found[1] in text(ROOT / "README.md").splitlines()
