"""Training: `sbp.fit`, its batches and metrics, and how a run ends, restarts and goes back to a good step.

In: a `Program`, its state and batches. Out: a `FitResult`. Used by: users.
"""

from sbp.runtime.training.fit import FitResult as FitResult
from sbp.runtime.training.restart import NonFinitePolicy as NonFinitePolicy
