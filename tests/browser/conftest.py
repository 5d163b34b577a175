"""A headless Chromium, and the pages that it opens."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import sbp
from benchmarks import cases, large
from sbp.passes.face import Plan
from sbp.passes.render.web_page import plan_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", type=Path, help="the folder that pictures of pages are kept in")


@dataclass
class Opened:
    """A page that a browser shows, and what it said and asked for meanwhile."""

    page: Any
    folder: Path
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def shoot(self, name: str) -> None:
        """Keeps a picture."""
        self.page.screenshot(path=str(self.folder / f"{name}.png"))

    def check(self) -> None:
        """Nothing was wrong, and nothing was asked of anybody."""
        assert not self.said and not self.asked, (self.said, self.asked)


@pytest.fixture(scope="session")
def gpt() -> Plan:
    """Two layers on eight H100s, nothing annotated."""
    case = cases.gpt_case("auto", (8,), 2, large.GPT, 8)
    program = sbp.compile(case.step, sbp.placement("h100", shape=(8,)), donate_argnums=(0, 1))
    return program.plan(*case.shapes())


@pytest.fixture(scope="session")
def page(gpt: Plan) -> str:
    return plan_page(gpt)


@pytest.fixture(scope="session", autouse=True)
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Opens HTML from a file."""
    folder: Path = request.config.getoption("--screenshots", default=None) or tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    opened: list[Opened] = []

    def opens(html: str, width: int = 1500, height: int = 1000, scheme: str = "light") -> Opened:
        file = tmp_path / f"page{len(opened)}.html"
        file.write_text(html, encoding="utf-8")
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        found = Opened(page, folder)
        page.on(
            "console",
            lambda m: found.said.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda e: found.said.append(str(e)))
        page.on(
            "request", lambda r: None if r.url.startswith(("file:", "blob:")) else found.asked.append(r.url)
        )
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        opened.append(found)
        return found

    yield opens
    for one in opened:
        one.page.close()
