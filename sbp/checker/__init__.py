"""A second opinion on a saved plan: its figures, added up again by code that shares none with passes/.

In: the data that `Plan.save("plan.json")` writes. Out: a `CheckReport`. Used by: the tests, and
`python -m sbp check`.
"""
