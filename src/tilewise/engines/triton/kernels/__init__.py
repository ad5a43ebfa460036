"""The Triton engine's device code."""
