"""The arrays of a state: as orbax takes them, written and read, with checksums."""
