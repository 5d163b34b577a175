"""Draws the pictures of the pages, from the programs of the pages.

python docs/make_pictures.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def pages() -> Any:
    """The module `docs/pages.py`."""
    spec = importlib.util.spec_from_file_location("sbp_docs_pages", ROOT / "docs" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Draws the plan of the README's example."""
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    _, names = pages().run(ROOT / "README.md", 1)
    plan = names["step"].plan(names["params"], names["opt_state"], names["batch"])
    plan.save(str(ROOT / "docs" / "pictures" / "mlp.svg"))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
