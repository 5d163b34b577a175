"""A physical program as one function per device, in a `shard_map`.

In: the physical program of a plan. Out: a jitted function, and the reference that runs op by op on one
device. Used by: `execute`, `pipeline`, `source`, `diagnose`.
"""
