"""The plan as data: every collective with its bytes, its line and its reason, and remarks.

In: the physical program. Out: `PlanData`; sentences on one collective. Used by: `render` and
the pipelines.

Words: docs/glossary.md.
"""
