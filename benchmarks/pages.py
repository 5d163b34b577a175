"""How fast the page of a plan opens, and how large it is, in a headless Chromium.

    python -m benchmarks.pages [--layers 12,96] [--placement 8]

A GPT's train step is planned for absent H100s. Seconds from the request of the file until the graph is drawn,
and from the click until a layer is open: the medians of some rounds. Memory is the heap of the page's scripts.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sbp
from benchmarks import cases, large

ROUNDS = 5
OPEN_LARGEST = """async () => {
  const m = sbpPage.model, shut = m.groups.kind.map((kind, k) => k).filter(k => m.groups.kind[k] === "layer");
  const largest = shut.sort((a, b) => m.groups.ops[b] - m.groups.ops[a])[0], began = performance.now();
  await sbpPage.view.toggle(largest);
  return (performance.now() - began) / 1000;
}"""


def page_file(layers: int, shape: Sequence[int], folder: Path) -> Path:
    """The page of a plan."""
    case = cases.gpt_case("auto", shape, layers, large.GPT, 8)
    program = sbp.compile(case.step, sbp.placement("h100", shape=tuple(shape)), donate_argnums=(0, 1))
    file = folder / f"{layers}.html"
    program.plan(*case.shapes()).save(file)
    return file


def measured(browser: Any, file: Path) -> tuple[float, float, float]:
    """Seconds until it is drawn and until a layer is open, and the bytes of its heap."""
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    began = time.perf_counter()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    drawn = time.perf_counter() - began
    opened = page.evaluate(OPEN_LARGEST)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")
    figures = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    page.close()
    return drawn, opened, figures["JSHeapUsedSize"]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="benchmarks.pages")
    parser.add_argument("--layers", default="12,96")
    parser.add_argument("--placement", default="8", help="sizes, such as 2x4")
    given = parser.parse_args(argv)
    shape = tuple(map(int, given.placement.split("x")))
    print("| layers | MB | open s | a layer s | heap MB |\n|---|---|---|---|---|")
    with sync_playwright() as p, tempfile.TemporaryDirectory() as folder:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for layers in map(int, given.layers.split(",")):
            file = page_file(layers, shape, Path(folder))
            rounds = [measured(browser, file) for _ in range(ROUNDS)]
            drawn, opened, heap = (statistics.median(column) for column in zip(*rounds, strict=True))
            size = file.stat().st_size / 1e6
            print(f"| {layers} | {size:.2f} | {drawn:.2f} | {opened:.2f} | {heap / 1e6:.0f} |", flush=True)
        browser.close()


if __name__ == "__main__":
    main()
