"""A distributed program as a Python module that people read and run.

In: a plan. Out: a `ProgramSource`. Used by: `plan.source()`, `Program.source`, reports of internal
errors.
"""
