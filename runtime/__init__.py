"""The machine: lowering, collectives, execution, and looking at what runs."""

if __name__ != "sbp.runtime":
    raise ImportError("import sbp.runtime, not runtime")
