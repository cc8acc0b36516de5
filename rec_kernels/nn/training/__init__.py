"""Fused optimizers: their state, their updates, gradient accumulation and scaled losses."""
