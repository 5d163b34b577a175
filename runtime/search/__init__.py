"""Plans of one function for many hierarchies of as many devices, ranked.

In: a function and a number of devices. Out: a `Ranking`. Used by: users, as `sbp.search`.
"""
