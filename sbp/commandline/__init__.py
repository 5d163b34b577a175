"""The command line `python -m sbp`: its commands, and the user's file that they load.

In: the arguments of a shell. Out: the function to plan, and options. Used by: `sbp.__main__`.
"""
