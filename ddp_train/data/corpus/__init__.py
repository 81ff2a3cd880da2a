"""Text and tokens, cut into windows."""
