"""Public operations: products, attention, packing of weights, and warmup."""
