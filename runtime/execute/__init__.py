"""One compiled signature of a program, and the checks and counts around its calls.

In: a jitted function with its plan. Out: results. Used by: `compile`, `saved`, `program`.
"""
