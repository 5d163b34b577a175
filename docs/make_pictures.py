"""Makes the pictures of the README and of the pages, and the figures that the gallery has beside them.

    python docs/make_pictures.py [NAME ...] [--check] [--live [FOLDER]]

Every picture is of a program of the pages: the README's example, train steps in docs/gallery, the main job.
`--check` changes nothing, says which are stale and returns 1; the tests ask the same. A picture is stale if
it says something else than it would now; figures may be 2 % off, and fonts and places do not count. `--live`
writes the pages of the gallery too, a megabyte each, to open in a browser.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import re
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PICTURES, GALLERY = ROOT / "docs" / "pictures", ROOT / "docs" / "gallery.md"
LIVE = ROOT / "out" / "gallery"
DEVICES, STEPS = 8, 3
"""CPU devices of the programs that run; steps of the main job by which its picture is checked."""
TOLERANCE = 0.02
UNLIMITED = 3600.0
"""Seconds that planning may take: the plan is that of a search without hurry, on a busy machine too."""
_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
_FIRST = re.compile(r"losses of the first steps: ([\d. ]+)")


@dataclass(frozen=True)
class Made:
    """What one program gives: its picture, the figures of the gallery, its page; empty where it has none."""

    picture: str
    figures: str = ""
    page: str = ""


def script(path: Path, name: str) -> Any:
    """A module of a file that is in no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def example() -> Made:
    """The plan of the README's example."""
    from sbp.passes.render.svg import plan_svg

    _, names = script(ROOT / "docs" / "pages.py", "sbp_docs_pages").run(ROOT / "README.md", 1)
    return Made(plan_svg(names["step"].plan(names["params"], names["opt_state"], names["batch"])))


def entry(name: str) -> Made:
    """A train step of docs/gallery."""
    from sbp.passes.render.svg import claim_svg
    from sbp.passes.render.web_page import plan_page

    step = script(ROOT / "docs" / "gallery" / f"{name}.py", f"sbp_docs_gallery_{name}")
    plan = planned(step)
    others = {said: planned(step, **how) for said, how in step.OTHERWISE.items()}
    return Made(claim_svg(plan), table({"**as here**": plan, **others}), plan_page(plan))


def planned(step: Any, **otherwise: Any) -> Any:
    """The plan of a module of the gallery, as it stands or with other signatures or another schedule."""
    import sbp

    in_sbp = otherwise.get("in_sbp", step.train_step_sbp)
    schedule = otherwise.get("schedule", getattr(step, "SCHEDULE", None))
    program = sbp.compile(
        step.train_step,
        step.train_step_placement,
        in_sbp=sbp.AUTO if in_sbp is None else in_sbp(step.train_step_placement),
        donate_argnums=(0, 1),
        options=sbp.Options(time_limit=UNLIMITED, pipeline=sbp.options.PipelineOptions(schedule=schedule)),
    )
    return program.plan(*step.train_step_args())


def table(plans: Mapping[str, Any]) -> str:
    """The figures of some plans of one train step, as Markdown."""
    from sbp.text.units import bytes_text, seconds_text

    lines = ["| | step | of it exposed | sent per device | memory |", "|---|---|---|---|---|"]
    for said, p in plans.items():
        times = seconds_text(p.step_seconds), seconds_text(p.exposed_seconds)
        lines.append(
            f"| {said} | {' | '.join(times)} | {bytes_text(p.wire_bytes)} | {bytes_text(p.memory_bytes)} |"
        )
    return "\n".join(lines) + "\n"


def losses(*options: str) -> Made:
    """The losses of the main job."""
    from models import gpt

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        gpt.main(["--sample", "0", "--out", folder, *options])
        return Made(Path(folder, "loss.svg").read_text(encoding="utf-8"))


MAKERS: Mapping[str, Callable[[], Made]] = {
    "mlp": example,
    **{
        path.stem: lambda name=path.stem: entry(name)
        for path in sorted((ROOT / "docs" / "gallery").glob("*.py"))
    },
    "loss": losses,
}


def texts(svg: str) -> Iterator[str]:
    """What a picture says, without what is read when it is pointed at."""
    for e in ET.fromstring(svg).iter():
        if e.tag.rpartition("}")[2] in ("text", "tspan"):
            yield (e.text or "").strip()


def same(a: str, b: str) -> bool:
    """Whether two texts say the same: all words, and figures within the tolerance.

    >>> same("21.4 ms, 48 all-reduce", "21.5 ms, 48 all-reduce"), same("21.4 ms", "21.4 us"), same("1", "2")
    (True, False, False)
    """
    numbers = [[float(x.replace(",", "")) for x in _NUMBER.findall(t)] for t in (a, b)]
    if _NUMBER.sub("#", a) != _NUMBER.sub("#", b):
        return False
    return all(abs(x - y) <= TOLERANCE * max(x, y) for x, y in zip(*numbers, strict=True))


def stale(name: str) -> str:
    """Why a picture is not what it would be now; nothing if it is."""
    there = PICTURES / f"{name}.svg"
    if not there.exists():
        return f"there is no {there.relative_to(ROOT)}"
    kept = there.read_text(encoding="utf-8")
    if name == "loss":
        first = (_FIRST.search(x) for x in (kept, losses("--steps", str(STEPS), "--no-check").picture))
        was, now = (found[1] if found else "" for found in first)
        return "" if same(was, now) else f"its first losses are {was}, now {now}"
    made = MAKERS[name]()
    for was, now in zip(texts(kept), texts(made.picture), strict=False):
        if not same(was, now):
            return f"it says {was!r}, now {now!r}"
    if len(list(texts(kept))) != len(list(texts(made.picture))):
        return "it says more, or less"
    figures = GALLERY.read_text(encoding="utf-8")
    was = "" if not made.figures else between(figures, name)
    return "" if same(was, made.figures) else f"the figures of {GALLERY.relative_to(ROOT)} are others"


def marks(name: str) -> tuple[str, str]:
    """What stands before and behind the figures of an entry of the gallery."""
    return f"<!-- begin {name}: python docs/make_pictures.py -->\n", f"<!-- end {name} -->\n"


def between(page: str, name: str) -> str:
    """The figures of an entry, as the page has them."""
    begin, end = marks(name)
    return page.partition(begin)[2].partition(end)[0].strip() + "\n"


def with_figures(page: str, name: str, figures: str) -> str:
    """The page with the figures of an entry replaced."""
    begin, end = marks(name)
    head, found, rest = page.partition(begin)
    assert found and end in rest, f"{GALLERY.name} has no place for the figures of {name}"
    return f"{head}{begin}\n{figures}\n{end}{rest.partition(end)[2]}"


def write(name: str, live: Path | None) -> None:
    """Makes a picture, and what goes with it."""
    made = MAKERS[name]()
    (PICTURES / f"{name}.svg").write_text(made.picture, encoding="utf-8")
    if made.figures:
        page = GALLERY.read_text(encoding="utf-8")
        GALLERY.write_text(with_figures(page, name, made.figures), encoding="utf-8")
    if live is not None and made.page:
        live.mkdir(parents=True, exist_ok=True)
        (live / f"{name}.html").write_text(made.page, encoding="utf-8")
        sys.stderr.write(f"{live / name}.html\n")


def main(argv: Sequence[str]) -> int:
    """Makes the pictures given, or all."""
    parser = argparse.ArgumentParser(
        prog="docs/make_pictures.py", description="Makes the pictures of the pages."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; default: all")
    parser.add_argument("--check", action="store_true", help="say which are stale, and change nothing")
    parser.add_argument(
        "--live",
        type=Path,
        nargs="?",
        const=LIVE,
        metavar="FOLDER",
        help="write the pages of the gallery too (without FOLDER to out/gallery)",
    )
    given = parser.parse_args(argv)
    if wrong := set(given.names) - set(MAKERS):
        parser.error(f"{', '.join(sorted(wrong))}: no picture of this name; there are {', '.join(MAKERS)}")
    import jax

    jax.config.update("jax_num_cpu_devices", DEVICES)
    found = 0
    for name in given.names or MAKERS:
        sys.stderr.write(f"{name}\n")
        if not given.check:
            write(name, given.live)
        elif why := stale(name):
            sys.stderr.write(f"  stale: {why}\n")
            found = 1
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
