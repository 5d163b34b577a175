"""What chips and their links were measured to do: collectives by kind, size and group, matrix products.

In: nothing. Out: seconds of one collective or one matrix product on one chip. Used by: the simulator of
compiled programs (runtime/target).
"""
