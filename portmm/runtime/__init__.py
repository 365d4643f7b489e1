"""Loading and launching kernels, by backend."""
