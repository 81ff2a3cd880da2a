"""The contents of a checkpoint: how it is written, read and copied elsewhere."""
