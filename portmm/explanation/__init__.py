"""Explanations of what was selected, and why."""
