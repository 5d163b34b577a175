"""Whether a plan does without a collective of another."""

from collections.abc import Sequence

from sbp.passes.explain.choices import SentAt
from sbp.passes.explain.plan import Collective, PlanData


def is_gone(c: Collective, sent: Sequence[SentAt] | None, plan: PlanData) -> bool:
    """Whether a plan does without a collective of another, and does not send the same at another line.

    Arguments:
      sent: by the plan that may do without it; None where that is not known.
      plan: the other one.
    """
    if sent is None or any(s.key == (c.kind, c.source, c.shape) for s in sent):
        return False
    before = sum(x.seconds for x in plan.collectives if (x.kind, x.shape) == (c.kind, c.shape))
    after = sum(s.seconds for s in sent if (s.kind, s.shape) == (c.kind, c.shape))
    return after <= before - c.seconds / 2
