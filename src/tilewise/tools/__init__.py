"""What people look at tilewise with: the command line, the demonstration, explain, watch, benchmarks, building ahead."""
