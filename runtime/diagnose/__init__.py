"""Where a distributed program differs from its function on one device.

In: a `Program` and arguments. Out: the first op that differs. Used by: users, as `sbp.verify`.
"""
