"""Detects, reports and survives failures: heartbeats, hangs, stops, restarts, failure reports,
locks."""
