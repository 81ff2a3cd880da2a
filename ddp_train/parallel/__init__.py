"""Strategies, by which the processes of a run share one model."""
