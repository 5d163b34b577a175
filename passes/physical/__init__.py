"""The physical program: what one device executes, every collective in place.

In: the graph, its candidates and an assignment. Out: `Physical`, with what it takes in seconds and bytes.
Used by: what explains, cuts and runs programs.

Words: docs/glossary.md.
"""
