"""Files on a file system or in an object store, and the owner of a folder there.

In: a path or a URL. Out: files that are written whole, and a lease. Used by: `arrays`, `checkpoint`,
`training`.
"""
