"""From loops to C, CUDA and OpenCL."""
