"""The distributed program as Python that reads well, and runs: `plan.source()`."""
