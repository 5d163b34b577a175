"""Whether a plan does without a collective of another."""

from sbp.passes.explain.choices import HeldPlan
from sbp.passes.explain.plan import Collective, PlanData


def is_gone(c: Collective, held: HeldPlan, plan: PlanData) -> bool:
    """Whether a plan does without a collective of another, and does not send the same at another line."""
    if held.sent is None or any(s.key == (c.kind, c.source, c.shape) for s in held.sent):
        return False
    before = sum(x.seconds for x in plan.collectives if (x.kind, x.shape) == (c.kind, c.shape))
    after = sum(s.seconds for s in held.sent if (s.kind, s.shape) == (c.kind, c.shape))
    return after <= before - c.seconds / 2
