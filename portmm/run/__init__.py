"""Loading and launching what was built."""
