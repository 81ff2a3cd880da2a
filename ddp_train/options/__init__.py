"""The schema of a run: its sections, and the options of each group in one registry. Torch-free."""
