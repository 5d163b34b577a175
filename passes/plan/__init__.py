"""Planning: candidates, cost, and the search for the cheapest signature of every op."""
