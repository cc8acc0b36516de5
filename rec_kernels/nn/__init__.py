"""Thin modules over the ops: state, initialisation, checkpointing. No maths of their own where there is an op."""
