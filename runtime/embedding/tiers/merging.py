"""Segments as one: the newest row of each key, a part at a time."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sbp.runtime.embedding.tiers import segment
from sbp.runtime.embedding.tiers.segment import BLOCK, Keys, Rows, Segment, Steps

MERGED = 1 << 18
"""Keys of all segments that are merged at a time."""


def merge_segments(segments: Sequence[Segment]) -> Iterator[tuple[Keys, Steps, Rows]]:
    """The newest row of each key of segments, oldest first; all parts but the last are of whole blocks.

    A part is overwritten by the next one.
    """
    if not segments:
        return
    for each in segments:
        each.check_blocks(np.arange(len(each.fences.first)))
    width, filled = segments[0].width, 0
    room = BLOCK + next(segment.parts(sum(map(len, segments)), width)).stop
    keys, steps, rows = np.empty(room, np.uint64), np.empty(room, np.int64), np.empty((room, width), np.uint8)
    for found, source, place in _newest(segments):
        for part in segment.parts(len(found), width):
            end = filled + part.stop - part.start
            keys[filled:end] = found[part]
            for k, each in enumerate(segments):
                at = np.flatnonzero(source[part] == k)
                steps[filled + at], rows[filled + at] = each.read(place[part][at])
            whole = end // BLOCK * BLOCK
            if whole:
                yield keys[:whole], steps[:whole], rows[:whole]
            filled = end - whole
            for x in (keys, steps, rows):
                x[:filled] = x[whole:end]
    if filled:
        yield keys[:filled], steps[:filled], rows[:filled]


def _newest(segments: Sequence[Segment]) -> Iterator[tuple[Keys, NDArray[np.int32], NDArray[np.intp]]]:
    """Keys of all segments in order, in parts, with which of them has the newest row of each, and where."""
    cuts = np.sort(np.concatenate([s.fences.first for s in segments]))[:: max(1, MERGED // BLOCK)][1:]
    ends = [np.append(np.searchsorted(s.keys, cuts), len(s)) for s in segments]
    begins = [np.append(0, end[:-1]) for end in ends]
    for k in range(len(cuts) + 1):
        spans = [np.arange(begin[k], end[k]) for begin, end in zip(begins, ends, strict=True)]
        keys = np.concatenate([s.keys[span] for s, span in zip(segments, spans, strict=True)])
        source = np.repeat(np.arange(len(segments), dtype=np.int32), [len(span) for span in spans])
        order = np.argsort(keys, kind="stable")  # of equal keys the newest is last
        keys, source, place = keys[order], source[order], np.concatenate(spans)[order]
        last = np.ones(len(keys), bool)
        last[:-1] = keys[1:] != keys[:-1]
        yield keys[last], source[last], place[last]
