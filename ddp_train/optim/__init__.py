"""Optimizers, learning-rate schedules, and the optimizer step."""
