"""The arguments of a call: bound to positions, checked, named, and brought to where a program wants them.

In: what the user passes. Out: leaves, with their paths and signatures. Used by: everything that is called.
"""
