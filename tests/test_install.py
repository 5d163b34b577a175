"""What is installed, from a tree whose two links have become text files as from any other."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sbp": "sbp", "passes": "sbp/passes", "runtime": "sbp/runtime"}
BUILD = "import setuptools.build_meta as m; print(m.build_wheel('wheels')); print(m.build_sdist('wheels'))"
URL, SITE = "https://forge.example/us/sbp", "https://docs.example/sbp"
# More than an import: all of the compiler, a run, and the tables that are data.
USE = """
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp, sbp
total = sbp.compile(lambda x: x.sum(0), sbp.placement("cpu", shape=(2,)), in_sbp=[sbp.S(0)])
print(sbp.__file__, total(jnp.ones(4)), len(total.plan(jnp.ones(4)).collectives))
from sbp.rates import chips, matmuls
print(matmuls.matmul_seconds(chips.CHIPS["h100"], 4096, 4096, 4096).source)
"""


def modules() -> set[str]:
    """All modules, as files of the wheel."""
    return {name for name in files() if name.endswith(".py")}


def files() -> set[str]:
    """All files of the packages, modules and data, as the wheel has them."""
    found = set()
    for folder, there in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.*"):
            rest = path.relative_to(ROOT / folder)
            if "__pycache__" in rest.parts:
                continue
            if folder != "sbp" or rest.parts[0] not in ("passes", "runtime"):
                found.add(f"{there}/{rest.as_posix()}")
    return found


def has_setuptools() -> bool:
    """Whether a wheel can be built without fetching anything."""
    try:
        return int(metadata.version("setuptools").split(".")[0]) >= 80
    except metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def text_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree with text for links, as in an archive from a web page."""
    tree = tmp_path_factory.mktemp("archive")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("docs", "models", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for path in filter(Path.is_file, (*ROOT.glob("*.*"), ROOT / "LICENSE")):
        shutil.copy(path, tree)
    for name in ("passes", "runtime"):
        (tree / "sbp" / name).unlink()
        (tree / "sbp" / name).write_text(f"../{name}", encoding="utf-8")
    return tree


def run(code: str, folder: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_without_links_the_import_says_what_to_do(text_tree: Path) -> None:
    # Without the packages of the environment: this tree may be installed there.
    done = run("import sbp", text_tree, "-S")
    assert done.returncode == 1
    last = done.stderr.strip().split("\n")[-1]
    assert last.startswith("ImportError: sbp/passes and sbp/runtime are no links") and "pip install ." in last


@pytest.mark.skipif(not has_setuptools(), reason="the extra `test` brings the setuptools that builds it")
def test_a_release_has_every_file_and_works(text_tree: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / ".ci" / "addresses", URL, SITE]
    subprocess.run(command, cwd=text_tree, check=True)
    done = run(BUILD, text_tree)
    assert done.returncode == 0, done.stderr
    made = [text_tree / "wheels" / line for line in done.stdout.split() if line.endswith((".whl", ".gz"))]
    with zipfile.ZipFile(made[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        wheel.extractall(tmp_path)
    assert names == files()
    done = run(USE, tmp_path)
    assert done.stdout.split() == [str(tmp_path / "sbp" / "__init__.py"), "4.0", "1", "measured"], done.stderr
    (described,) = tmp_path.glob("*.dist-info/METADATA")
    page = described.read_text(encoding="utf-8")
    assert f"Project-URL: Documentation, {SITE}\n" in page
    assert f"]({URL}/blob/main/docs/concepts.md)" in page
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", page)  # no link that the page of a package has not
    with tarfile.open(made[1]) as source:
        held = {name.partition("/")[2] for name in source.getnames()}
    assert {"CHANGELOG.md", "docs/index.md", "models/gpt.py", "passes/chain.py"} <= held
    assert not [name for name in held if name.startswith(("tests", "docs/notes"))]
