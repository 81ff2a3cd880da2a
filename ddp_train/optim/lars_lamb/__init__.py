"""LARS and LAMB: a learning rate for each layer."""
