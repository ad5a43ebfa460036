"""What the GPU engines are made of: code generation, compiling, launching, tuning, tile schedules, shared device functions (`kernels`)."""
