"""Several processes that run one program: joining, agreement, failures, and a launcher.

In: JAX's distributed service. Out: a `ProcessGroup`, and errors that name the process at fault. Used by:
everything that compiles, saves or runs.
"""
