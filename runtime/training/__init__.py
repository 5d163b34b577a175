"""Training: `sbp.fit`, what it is fed with, what it notes, and how it ends, goes back and goes on."""

from sbp.runtime.training.fit import FitResult as FitResult
from sbp.runtime.training.policy import NonFinitePolicy as NonFinitePolicy
