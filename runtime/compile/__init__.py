"""From a function and the arguments of a call to a plan, and from a plan to a compiled program.

In: a Python function, a placement, options. Out: a `TracedCall` with its plan, and what runs it. Used by:
`program`, `search`.
"""
