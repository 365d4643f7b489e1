"""Block programs for devices."""
