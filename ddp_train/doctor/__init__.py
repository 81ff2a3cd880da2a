"""A wing: is this machine, are these machines, fit to train? `python launch.py mode=doctor`."""
