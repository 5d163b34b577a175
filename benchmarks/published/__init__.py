"""Published training steps, estimated by the planner's evaluator and compared with what was measured.

    python -m benchmarks.published STEPS.csv [--rows 1,5,7] [--out results.json]

`rows` reads a row, `model` is the train step of one device, `layout` says how its tensors lie, `program`
plans it, `estimate` puts stages together, `figures` compares. docs/published.md says what is modelled.
"""
