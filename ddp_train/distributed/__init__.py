"""All knowledge of ranks, worlds, their environment, back ends and collectives. No other module asks who it is."""
