"""A plan as text, page, picture, JSON and trace.

In: `PlanData`, of one placement or of stages. Out: text to print or to write. Used by: `face.py`
and the command line.

Words: docs/glossary.md.
"""
