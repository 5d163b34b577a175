"""Rows of tables that neither devices nor the host can hold: on a disk, by key, in files that never change.

In: sorted keys and rows of bytes. Out: the same, by version. Used by: whoever trains tables larger than
memory.
"""
