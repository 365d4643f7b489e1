"""Dispatch: from a problem to a kernel that is loaded."""
