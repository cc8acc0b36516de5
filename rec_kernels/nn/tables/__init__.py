"""Tables of a collection: what they are, where their rows lie, and what moves them between memories."""
