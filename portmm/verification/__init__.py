"""Verification of fused programs over finite fields, of their emitted kernels, and certificates."""
