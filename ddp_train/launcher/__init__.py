"""Starts and watches the processes of a run, on one host, on several, or of a sweep."""
