"""The algorithms of ops whose devices talk to each other in the middle: the entry page is docs/talking.md.

In: the shards of one op on one device, and a `Local`, which says where they lie and reaches other devices.
Out: the shards of its results; and, before anything runs, the `Talk`s that say what will be sent, so that a
plan can price it. The rules import this package, and so may the compiler and the machine; it knows none of
them.
"""
