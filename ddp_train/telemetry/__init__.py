"""What a run records and shows: metrics, the terminal, hardware, experiment trackers. It never
changes results."""
