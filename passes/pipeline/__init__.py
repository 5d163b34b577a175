"""Pipelines: a program whose ops belong to several placements, taken apart into a program for each.

In: the logical graph of the whole, and a way to plan one placement. Out: `Stages`, their pieces and the
`PlanData` of all. Used by: the chain, `render` and the runtime.

`op_placement` assigns every op to a placement, `order` finds the stages (numbered by `numbering`), `sums`
keeps a sum over micro-batches for each stage, `split` makes a graph per placement, `planning` plans them, and
`cut` cuts a physical program into the pieces that a schedule runs. `edges` has which stage feeds
which, `check` what must hold of the pieces.

Words: docs/glossary.md.
"""
