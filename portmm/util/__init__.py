"""Helpers that know nothing of matrix products."""
