"""Helpers that are independent of matrix products."""
