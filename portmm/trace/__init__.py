"""From a Python function to expressions."""
