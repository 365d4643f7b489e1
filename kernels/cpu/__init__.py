"""Kernels for CPUs, as block programs."""
