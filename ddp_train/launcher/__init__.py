"""Starts and watches the processes of a run on one host or on several. Torch-free."""
