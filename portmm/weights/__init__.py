"""Quantized weights and their files."""
