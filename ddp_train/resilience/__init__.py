"""What notices, explains and survives failures: heartbeats, hangs, stops, restarts, reports, locks."""
