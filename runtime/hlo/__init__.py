"""Pages, pictures and meters: ways to look at a compiled program."""
