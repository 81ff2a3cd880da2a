"""What lies in a checkpoint, and how it is written, read and copied elsewhere."""
