"""Device functions that the kernels of the GPU engines call, and the kernel that classifies tiles."""
