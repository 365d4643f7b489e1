"""What it is computed on: instruction sets, chips, devices and cloud instances."""
