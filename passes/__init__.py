"""The compiler: pure passes, graph in, graph and report out; no device."""

if __name__ != "sbp.passes":
    raise ImportError("import sbp.passes, not passes")
