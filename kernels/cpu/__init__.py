"""Block programs for processors."""
