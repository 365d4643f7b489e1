"""The loop IR: index expressions, nodes, kernels, their meaning in NumPy, and the calling convention."""
