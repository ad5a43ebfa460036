"""Device functions that the kernels of both GPU engines call, and the kernel that classifies tiles."""
