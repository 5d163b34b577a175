"""What chips and their links were measured to do.

In: nothing. Out: chips, and the seconds of one collective or one matrix product on one of them. Used by: the
simulator of compiled programs (runtime/target).
"""
