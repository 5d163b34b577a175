"""The models start with the extra of the README's first command, and name that of what else they need."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from models.recommender import feed, synthetic
from models.recommender.layout import CRITEO, DataError
from models.recommender.synthetic import Teacher

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
IMPORTED_AS = {"absl-py": "absl", "pytest-xdist": "xdist", "scikit-learn": "sklearn"}
# Imports modules where some packages are not installed.
WITHOUT = """
import importlib, sys
packages, modules = (text.split(",") for text in sys.argv[1:])
sys.modules.update(dict.fromkeys(packages))
for module in modules:
    importlib.import_module(module)
"""


def packages(extra: str) -> set[str]:
    """What an extra lists, as it is imported."""
    names = [re.split(r"[^\w-]", line)[0] for line in EXTRAS[extra] if not line.startswith("sbp-jax")]
    return {IMPORTED_AS.get(name, name) for name in names}


@pytest.mark.full
def test_every_model_starts_with_the_examples_alone() -> None:
    # optax brings absl.
    missing = (packages("recommender") | packages("test")) - packages("examples") - {"absl"}
    assert {"pyarrow", "hypothesis", "flax", "xdist"} <= missing
    modules = [f"models.{p.stem}" for p in sorted((ROOT / "models").glob("*.py"))]
    run = [sys.executable, "-c", WITHOUT, ",".join(sorted(missing)), ",".join(modules)]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_needs_pyarrow_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [
        m for m in sys.modules if m.split(".")[0] == "pyarrow" or m.startswith("models.recommender.c")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delattr("models.recommender.criteo", raising=False)
    data = feed.Data("day", ("day.tsv",), (), CRITEO, (5,) * 26, hashing=True)
    calls: list[Any] = [
        lambda: data.first_batch(4),
        lambda: synthetic.write(tmp_path / "x.parquet", Teacher.plant((5,)), 4),
    ]
    for call in calls:
        with pytest.raises(
            DataError, match=r"pyarrow\n  got    it is not installed\n.*the extra `recommender`"
        ):
            call()
