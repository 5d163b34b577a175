"""Cost tables by content: equal tables, as in repeated layers, are stored and worked on once."""

import hashlib
from collections import Counter

import numpy as np

from sbp.compat.exact_keys import memo, results_of
from sbp.passes.plan import sweeps
from sbp.passes.plan.network import Table

Kept = tuple[int, ...]
"""State indices, ascending where they are a choice."""

_ROUNDING = 4e-15
"""A table is a sum of a row and a column if it is so up to this part of its largest entry."""


class TableStore:
    """Arrays by content: equal arrays get one number, so that work on them is done and kept once."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self._by_content: dict[tuple[tuple[int, ...], bytes], int] = {}
        self._by_object: dict[int, tuple[int, Table]] = {}

    def put(self, table: Table) -> int:
        """Number of this content."""
        table = np.asarray(table, dtype=np.float64, order="C")
        key = (table.shape, hashlib.sha1(table.data, usedforsecurity=False).digest())
        number = self._by_content.get(key)
        if number is None:
            number = self._by_content[key] = len(self.tables)
            self.tables.append(table)
        return number

    def put_shared(self, table: Table) -> int:
        """Like put, for arrays that come again as the same object."""
        known = self._by_object.get(id(table))
        if known is None:  # the array is kept alive, or its address could be given to another one
            known = self._by_object[id(table)] = (self.put(table), table)
        return known[0]


class TableAlgebra:
    """Operations on tables by number. The rows of an edge table are the states of the node in question."""

    def __init__(self) -> None:
        self.store = TableStore()

    @memo
    def add(self, a: int, b: int) -> int:
        """Sum of two tables."""
        return self.store.put(self.store.tables[a] + self.store.tables[b])

    @memo
    def transpose(self, number: int) -> int:
        """The table seen from the other node."""
        result = self.store.put(self.store.tables[number].T)
        results_of(self, "transpose")[(result,)] = number
        return result

    @memo
    def take(self, number: int, rows: Kept) -> int:
        """The table with these rows only."""
        return self.store.put(self.store.tables[number][list(rows)])

    @memo
    def normal(self, number: int) -> tuple[int, float]:
        """The table less its smallest entry, and that entry (inf if the table has no finite one)."""
        table = self.store.tables[number]
        least = float(table.min())
        if least == 0.0 or least == np.inf:
            return number, least
        return self.store.put(table - least), least

    @memo
    def live_rows(self, number: int) -> Kept | None:
        """Rows with a finite entry; None if all have one."""
        table = self.store.tables[number]
        if table.max() < np.inf:
            return None
        live = (table if table.ndim == 1 else table.min(axis=1)) < np.inf
        return None if live.all() else tuple(np.flatnonzero(live).tolist())

    @memo
    def determines(self, number: int) -> bool:
        """Whether every row has at most one finite entry."""
        table = self.store.tables[number]
        return bool(table.max() == np.inf) and bool((np.isfinite(table).sum(axis=1) <= 1).all())

    @memo
    def follow(self, number: int) -> Kept:
        """Column of the finite entry of each row."""
        return tuple(self.store.tables[number].argmin(axis=1).tolist())

    @memo
    def separate(self, number: int) -> tuple[int, int] | None:
        """Row costs and column costs that add up to the table, if there are any."""
        table = self.store.tables[number]
        if table.max() == np.inf:
            return None
        row, column = table[:, 0], table[0] - table[0, 0]
        if np.abs(table - row[:, None] - column).max() > _ROUNDING * np.abs(table).max():
            return None
        return self.store.put(row), self.store.put(column)

    @memo
    def message(self, theta: int | None, number: int) -> int:
        """Cheapest of the rows, plus their own costs if given, for each column."""
        table = self.store.tables[number]
        return self.store.put(
            (table if theta is None else table + self.store.tables[theta][:, None]).min(axis=0)
        )

    @memo
    def product(self, theta: int, to_a: int, to_b: int) -> int:
        """Min-plus product of two tables over their common rows, with costs of these rows."""
        a = self.store.tables[to_a] + self.store.tables[theta][:, None]
        return self.store.put(sweeps.min_plus(a, self.store.tables[to_b]))

    @memo
    def undominated_states(
        self, theta: int, numbers: tuple[int, ...], loads: tuple[int, ...] = ()
    ) -> Kept | None:
        """States that no other state replaces at no more cost, whatever the neighbours do; None if all.

        What replaces a state has no more of any of the loads.

        Of states that replace each other the lowest stays.
        """
        costs = self.store.tables[theta]
        extra = costs[None, :] - costs[:, None]
        with np.errstate(invalid="ignore"):
            for number, times in Counter(numbers).items():
                extra = extra + times * self._replacement(number)
            replaces = extra <= 0.0
        for number in loads:
            size = self.store.tables[number]
            replaces &= size[None, :] <= size[:, None]
        np.fill_diagonal(replaces, False)
        kept = np.ones(len(costs), dtype=bool)
        for state in np.flatnonzero(replaces.any(axis=1))[::-1].tolist():
            kept[state] = not replaces[state, kept].any()
        return None if kept.all() else tuple(np.flatnonzero(kept).tolist())

    @memo
    def _replacement(self, number: int) -> Table:
        """Entry (a, b): the most that row b can cost more than row a."""
        return sweeps.replacement(self.store.tables[number])
