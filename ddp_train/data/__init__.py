"""Data sets, the order of their samples, augmentation and loading."""
