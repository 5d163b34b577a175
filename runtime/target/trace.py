def trace_json(s, r):
    return ""
