"""One run on one process, from its start to its exit code."""
