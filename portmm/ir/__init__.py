"""Loop IR: index expressions, nodes, kernels, an interpreter in NumPy, and the calling convention."""
