"""The command line: flags, and the commands beside training. Torch-free."""
