"""Programs lowered and compiled before their first call, for devices that need not be here.

In: a traced call. Out: `jax.stages.Lowered`, or a report of the compiled programs of a pipeline. Used by:
`program`.
"""
