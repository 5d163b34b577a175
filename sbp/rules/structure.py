"""Ops without arithmetic of their own that are not element-wise."""

from __future__ import annotations

from sbp.rules.registry import Op, Row, rule


@rule("create_token", "device_put_noop", note="no tensor")
def nothing(op: Op) -> list[Row]:
    """No tensor to split."""
    return []
