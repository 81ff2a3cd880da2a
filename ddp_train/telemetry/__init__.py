"""Records and displays of a run: metrics, the terminal, hardware, experiment trackers. It never
changes results."""
