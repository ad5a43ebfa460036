"""A module that attacks import inside their functions."""

limit = 3
