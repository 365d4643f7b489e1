"""Tracing: a Python function becomes expressions."""
