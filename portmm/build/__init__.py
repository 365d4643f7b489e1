"""Compilers, the cache of what they made, and loading it safely."""
