"""Functions on whole arrays, as few kernels as possible."""
