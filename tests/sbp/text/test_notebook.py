"""In a notebook: cells are called by their numbers, placements and signatures are shown as what they are."""

import sys
from types import SimpleNamespace

import jax
import pytest

import sbp
from sbp import B, P, S
from sbp.signature import Signature
from sbp.text.notebook import MOST, file_name


def in_a_notebook(monkeypatch: pytest.MonkeyPatch, cells: dict[str, int]) -> None:
    shell = SimpleNamespace(compile=SimpleNamespace(_filename_map=cells))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_cell_is_called_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_notebook(monkeypatch, {"/tmp/ipykernel_7/3.py": 12})
    assert file_name("/tmp/ipykernel_7/3.py") == "cell 12"
    assert file_name("models/gpt.py") == "gpt.py"
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert file_name("/tmp/ipykernel_7/3.py") == "3.py"


def test_plans_name_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "/tmp/ipykernel_7/3.py"
    in_a_notebook(monkeypatch, {cell: 12})
    names: dict[str, object] = {}
    exec(compile("def f(x):\n    return (x @ x.T).sum()\n", cell, "exec"), names)
    program = sbp.compile(names["f"], sbp.placement("cpu", shape=(4,)), in_sbp=([S(1)],))  # type: ignore[arg-type]
    text = str(program.plan(jax.ShapeDtypeStruct((8, 8), "float32")))
    assert "cell 12:2" in text and "3.py" not in text


def test_a_placement_is_a_grid_of_ranks() -> None:
    html = sbp.placement("cpu", shape=(2, 4), axes=("data", "model"))._repr_html_()
    assert html.count("<tr>") == 2 and html.count("<td") == 8 and "data down, model across" in html
    assert html.index(">3<") < html.index(">4<")
    many = sbp.placement("h100", shape=(128, 8))._repr_html_()
    assert many.count("<tr>") == MOST + 1 and many.count("…") == 1
    wide = sbp.placement("h100", shape=(64,))._repr_html_()
    assert wide.count("<td") == MOST + 1 and "across" in wide


@pytest.mark.parametrize("s", [S(2), B, P, P("max")])
def test_a_signature_says_what_it_means(s: Signature) -> None:
    html = s._repr_html_()
    assert f"<code>{s!r}</code>" in html and "along this axis" in html
