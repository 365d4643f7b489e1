"""Compilers, the cache of compiled kernels, and the loading of verified code."""
