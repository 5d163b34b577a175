"""Keys of the next batch travel while a GPU program computes: XLA schedules them under the dense part."""

import jax
import numpy as np
import optax
import pytest

import sbp
from models.dlrm import DLRM
from models.recommender.batch import Batch
from models.recommender.learner import Inputs, Learner
from models.recommender.training import OPTIMIZERS, collection_of
from sbp.options import ExchangeOptions
from tests.runtime.target.plugin import needs_plugin

WIDTH, ROWS, FEATURES, DENSE, BATCH = 128, 1 << 17, 26, 13, 1 << 16

pytestmark = needs_plugin


@pytest.mark.full
def test_keys_are_hidden_under_the_dense_part() -> None:
    """At least 80 % of the message, in a DLRM as wide as MLPerf's; else all lookups wait for it."""
    rule, placement = OPTIMIZERS["adagrad"], sbp.placement("h100", shape=(8,))
    model = DLRM((512, 256), (1024, 1024, 512, 256))
    tables = collection_of((ROWS,) * FEATURES, WIDTH, "rows", 8)
    learner = Learner(model, Inputs(DENSE, FEATURES, WIDTH), tables, rule.make(0.1), optax.adam(1e-3))
    params = jax.eval_shape(learner.init, jax.eval_shape(jax.random.key, 0))
    parts = np.zeros(BATCH, np.float32), np.zeros((BATCH, DENSE), np.float32)
    batch = jax.eval_shape(lambda x: x, Batch(*parts, np.zeros((BATCH, FEATURES), np.int32)))
    args = params, jax.eval_shape(learner.init_state, params), batch

    def exposed(prefetch: bool) -> float:
        """The share of the message of keys that kernels wait for."""
        report = sbp.compile(
            learner.step,
            placement,
            in_sbp=learner.in_sbp(placement),
            options=sbp.Options(exchange=ExchangeOptions(prefetch=prefetch)),
            donate_argnums=(0, 1),
        ).report(*args)
        assert report.byte_error == pytest.approx(0, abs=1e-3) and not report.unexplained_differences
        sent = [c for c in report.collectives if c.kind == "all_to_all" and not c.conditional]
        assert len(sent) == 3, "keys, rows and sums"
        (keys,) = (c for c in sent if c.dtypes == ("s32",))
        assert keys.seconds is not None and keys.exposed_seconds is not None
        return keys.exposed_seconds / keys.seconds

    assert exposed(True) <= 0.2 < exposed(False)
