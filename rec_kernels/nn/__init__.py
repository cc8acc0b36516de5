"""Thin modules over the ops: state, initialisation, checkpointing. No maths."""
