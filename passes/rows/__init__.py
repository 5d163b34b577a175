"""Tables that are trained by rows: found in the logical graph, and rewritten as lookups and updates.

In: the logical graph. Out: the same program with `sbp_lookup` and `sbp_update_rows`. Used by the chain alone;
it knows `program`.

Words: docs/glossary.md.
"""
