"""Learning rates as functions of the optimizer step."""
