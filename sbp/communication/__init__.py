"""The algorithms of ops whose devices exchange data inside the op: the entry page is docs/communication.md.

In: the shards of one op on one device, and a `Context`, which has their layouts and reaches other devices.
Out: the shards of its results; and, before anything runs, a `Communication` per collective, so that a plan
can price it. Used by: the rules, the compiler and the runtime; it imports none of them.
"""
