"""NaN and infinities: in what the ops of a program make, and in a state that is saved."""
