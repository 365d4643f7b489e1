"""Quantized weights, and the files that hold them."""
