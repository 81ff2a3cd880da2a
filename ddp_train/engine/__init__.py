"""The training loop, what observes its steps, and the hooks between them."""
