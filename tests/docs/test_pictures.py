"""The pictures of the pages are those of today's plans."""

import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT, script

make_pictures = script("make_pictures")


@pytest.mark.full
@pytest.mark.parametrize("name", list(make_pictures.MAKERS))
def test_a_picture_shows_what_it_would_now(name: str) -> None:
    assert not make_pictures.stale(name), f"run `python docs/make_pictures.py {name}`"


def test_every_picture_is_made_and_shown() -> None:
    files = {path.stem for path in (ROOT / "docs" / "pictures").iterdir()}
    assert files == set(make_pictures.MAKERS)
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert not [name for name in files if f"pictures/{name}.svg)" not in shown]


def test_pictures_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "pictures").iterdir()}
    assert all(size < 60_000 for size in sizes.values()), sizes


def test_figures_may_be_a_little_off() -> None:
    assert make_pictures.same("21.4 ms, 48 all-reduce", "21.5 ms, 48 all-reduce")
    assert not make_pictures.same("21.4 ms", "22.4 ms")
    assert not make_pictures.same("21.4 ms", "21.4 us")
    assert not make_pictures.same("1,000 tokens", "2,000 tokens")
    assert not make_pictures.same("", "21.4 ms")


def test_a_stale_picture_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another word, another figure, fewer words; other fonts and places are no matter."""
    picture = (
        '<svg xmlns="http://www.w3.org/2000/svg"><text x="1">21.4 ms</text><text>all-reduce</text></svg>'
    )
    monkeypatch.setattr(make_pictures, "PICTURES", tmp_path)
    monkeypatch.setattr(make_pictures, "ROOT", tmp_path)
    monkeypatch.setattr(make_pictures, "MAKERS", {"a": lambda: make_pictures.Made(picture)})
    assert make_pictures.stale("a") == "there is no a.svg"
    cases = {
        picture: "",
        picture.replace('x="1"', 'x="2" font-size="9"'): "",
        picture.replace("21.4", "20.4"): "it says '20.4 ms', now '21.4 ms'",
        picture.replace("reduce", "gather"): "it says 'all-gather', now 'all-reduce'",
        picture.replace("<text>all-reduce</text>", ""): "it says more, or less",
    }
    gallery = tmp_path / "gallery.md"
    gallery.write_text("", encoding="utf-8")
    monkeypatch.setattr(make_pictures, "GALLERY", gallery)
    for kept, why in cases.items():
        (tmp_path / "a.svg").write_text(kept, encoding="utf-8")
        assert make_pictures.stale("a") == why


def test_stale_figures_beside_a_picture_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = '<svg xmlns="http://www.w3.org/2000/svg"/>'
    made = make_pictures.Made(picture, "| 21.4 ms |\n")
    begin, end = make_pictures.marks("a")
    gallery = tmp_path / "gallery.md"
    gallery.write_text(f"before\n{begin}\n{end}after\n", encoding="utf-8")
    for attribute, value in {"PICTURES": tmp_path, "ROOT": tmp_path, "GALLERY": gallery}.items():
        monkeypatch.setattr(make_pictures, attribute, value)
    monkeypatch.setattr(make_pictures, "MAKERS", {"a": lambda: made})
    (tmp_path / "a.svg").write_text(picture, encoding="utf-8")
    assert make_pictures.stale("a") == "the figures of gallery.md are others"
    make_pictures.write("a", None)
    assert gallery.read_text(encoding="utf-8") == f"before\n{begin}\n| 21.4 ms |\n\n{end}after\n"
    assert make_pictures.stale("a") == ""


def test_a_picture_of_no_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["make_pictures.py"])
    with pytest.raises(SystemExit):
        make_pictures.main(["gtp"])
    assert "gtp: no picture of this name; there are mlp, dlrm, gpt" in capsys.readouterr().err
