"""What one types: flags, and the commands beside training. Torch-free."""
