"""Sweeps (`-m`): which trials, how many at a time, their results and their page. Torch-free."""
