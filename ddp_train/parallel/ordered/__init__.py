"""Gradients summed in a fixed order."""
