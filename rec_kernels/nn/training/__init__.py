"""What a fused optimizer has: its state, its updates, gradient accumulation and scaled losses."""
