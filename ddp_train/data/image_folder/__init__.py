"""Images in one folder per class."""
