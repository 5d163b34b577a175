"""Waiting for what a page does by itself."""

from __future__ import annotations

from typing import Any


def until(page: Any, true: str) -> None:
    """Waits until an expression is true, asked from here: the page lets nobody evaluate text in it."""
    for _ in range(200):
        if page.evaluate(true):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {true}")
