"""Public operations."""
