"""A second opinion on a saved plan: what its JSON says, added up again by code that shares none with passes/.

In: the data that `Plan.save("plan.json")` writes. Out: a `CheckReport`. Users: the tests, and
`python -m sbp check`.
"""
