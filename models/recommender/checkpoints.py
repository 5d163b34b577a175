"""Checkpoints of a recommender: it goes on with its tables split otherwise, and on other devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sbp
from models.recommender.learner import AUTO, Learner, collection_of
from sbp.runtime.embedding import Collection

TABLES = "tables"


def checkpoints(path: str | Path, learner: Learner) -> sbp.Checkpoints:
    """The checkpoints of a run: `(parameters, state of the optimizers)` of a learner, step by step."""

    def earlier(extra: Mapping[str, Any]) -> Collection:
        """The tables of a checkpoint of version 0.1, which has the name of their layout beside the state."""
        if TABLES not in extra:
            return learner.tables
        lies = {**extra[TABLES]}
        lies["layout"] = "rows" if lies["layout"] == AUTO else lies["layout"]  # then the planner split rows
        sizes = [table.vocabulary_size for table in learner.tables.tables]
        return collection_of(sizes, learner.inputs.width, **lies)

    return sbp.Checkpoints(path, tables=learner.tables, earlier=earlier)
