"""One run on one process: from the frozen config to the last summary."""
