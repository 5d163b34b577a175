"""Training: `sbp.fit`, what it is fed with, what it notes, and how it ends, goes back and goes on."""
