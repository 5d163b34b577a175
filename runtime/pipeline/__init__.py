"""Pipelines on devices: the pieces of each placement as programs, run in the order of a schedule."""
