"""Plans of one function for many hierarchies of as many devices, ranked."""
