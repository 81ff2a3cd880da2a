"""Ranks, world size, environment variables, backends and collectives. No other package reads them
by itself."""
