"""Pipelines: a program whose ops belong to several placements, taken apart into a program for each.

In: the logical graph of the whole, and a way to plan one placement. Out: `Stages`, their pieces and the
`PipelineData` of all. The chain, `look` and the runtime use it; it knows no way to show a plan.

`where` says where every op belongs, `order` finds stages (numbered by `numbering`) and what of the backward
pass others wait for, `sums` keeps what each stage adds up over micro-batches apart, `split` makes a graph for
each placement, `planning` plans them, `cut` takes a physical program apart again, into the pieces that a
schedule runs. `edges` says which stage feeds which, `check` what must hold of the pieces.

Words: docs/glossary.md.
"""
