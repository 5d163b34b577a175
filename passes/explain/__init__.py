"""The plan as data: every collective with its bytes, its line and its reason, and remarks.

In: the physical program. Out: `PlanData`; sentences on one collective. `look` and the pipelines use it; it
knows nothing of how plans are shown.

Words: docs/glossary.md.
"""
