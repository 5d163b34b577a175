"""Sparse embeddings: keys, vocabularies, bags of ids, and tables that are split over devices.

The tables are plain arrays and a lookup is plain JAX. A model that uses them is written for one device,
and the compiler inserts the exchanges.

In: features and tables. Out: a `Collection` with parameters, lookups and signatures. Used by: users, as
`sbp.embedding`.
"""

from sbp.runtime.embedding.accumulation import Accumulation, AccumulationState, accumulate
from sbp.runtime.embedding.admission import Admission
from sbp.runtime.embedding.choice import Choice, TableChoice, choose
from sbp.runtime.embedding.collection import Collection
from sbp.runtime.embedding.costs import Estimate
from sbp.runtime.embedding.eviction import LeastFrequentlyUsed, LeastRecentlyUsed, Policy, Refuse
from sbp.runtime.embedding.features import Bags, KeyedBags, PaddedBags
from sbp.runtime.embedding.keys import NO_ID, check_ids, separate, unify
from sbp.runtime.embedding.pooling import COMBINERS, pool
from sbp.runtime.embedding.row_reset import RowReset, reset_rows, row_reset
from sbp.runtime.embedding.table_files import export_table, import_table
from sbp.runtime.embedding.tables import (
    ColumnWise,
    FeatureConfig,
    QuotientRemainder,
    Replicated,
    RowWise,
    TableConfig,
    TableWise,
    Uncompressed,
)
from sbp.runtime.embedding.tiers.feed import TierFeed
from sbp.runtime.embedding.tiers.tiered import Tiered
from sbp.runtime.embedding.vocabulary import Assignment, Vocabulary, initial_rows

__all__ = [
    "COMBINERS",
    "NO_ID",
    "Accumulation",
    "AccumulationState",
    "Admission",
    "Assignment",
    "Bags",
    "Choice",
    "Collection",
    "ColumnWise",
    "Estimate",
    "FeatureConfig",
    "KeyedBags",
    "LeastFrequentlyUsed",
    "LeastRecentlyUsed",
    "PaddedBags",
    "Policy",
    "QuotientRemainder",
    "Refuse",
    "RowReset",
    "Replicated",
    "RowWise",
    "TableChoice",
    "TableConfig",
    "TableWise",
    "TierFeed",
    "Tiered",
    "Uncompressed",
    "Vocabulary",
    "accumulate",
    "check_ids",
    "choose",
    "export_table",
    "import_table",
    "initial_rows",
    "pool",
    "reset_rows",
    "row_reset",
    "separate",
    "unify",
]
