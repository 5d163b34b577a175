"""A second opinion on a saved plan: what its JSON says is added up again, by code that shares none with passes/.

In: the data that `Plan.save("plan.json")` writes. Out: a `CheckReport`. Used by `python -m sbp check` and by tests.
"""
