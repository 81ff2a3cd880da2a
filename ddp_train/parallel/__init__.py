"""How the processes of a run share one model: strategies, their reductions, batch norm over all of
them."""
