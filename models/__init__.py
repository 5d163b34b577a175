"""Models in plain single-device JAX, each with its table of signatures; run with `python -m models.gpt`."""
