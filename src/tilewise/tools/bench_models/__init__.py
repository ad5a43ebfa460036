"""Whole models with each attention, for `tilewise bench model` and benchmarks/models.py: the rows, how they are measured, and by which processes."""
