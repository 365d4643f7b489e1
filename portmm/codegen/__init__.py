"""Code generation from loops: C, CUDA and OpenCL."""
