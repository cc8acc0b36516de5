"""Thin modules over the ops: state, initialisation, checkpointing, networks. No maths that an op has."""
