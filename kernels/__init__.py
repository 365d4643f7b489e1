"""Kernels: programs in portmm's loop IR, written once for all targets."""
