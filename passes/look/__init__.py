"""What people and files get of a plan: text, page, picture, JSON, trace.

In: `PlanData`, of one placement or of stages. Out: text to print or to write. `face.py` and the command line
use it; nothing else does.

Words: docs/glossary.md.
"""
