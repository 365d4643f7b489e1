"""Targets: instruction sets, chips, devices and cloud instances."""
