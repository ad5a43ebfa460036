"""The Hopper engine's device code."""
