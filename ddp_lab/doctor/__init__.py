"""`mode=doctor`: checks whether hosts, GPUs, network and files are fit for a run."""
