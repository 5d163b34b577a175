"""The physical program: what one device executes, every collective in place.

In: the graph, its candidates and an assignment. Out: `Physical`, with what it takes in seconds and bytes.
It knows the rooms that plan; what explains, stages and runs programs uses it.

Words: docs/glossary.md.
"""
