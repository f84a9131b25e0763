"""The accumulation window: its micro-batches, their weights, one step."""
