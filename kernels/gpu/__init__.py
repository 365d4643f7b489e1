"""Kernels for GPUs, as programs of thread blocks."""
