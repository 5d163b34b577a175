"""`sbp.compile`, and the `Program` that it gives.

In: the user's function. Out: a `Program`: called as the function is, and asked for its plan, source or
report. Used by: users, `training`, `checkpoint`, `diagnose`.
"""
