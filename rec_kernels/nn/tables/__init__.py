"""Tables of a collection: configurations, memory layout, storage tiers and row cache."""
