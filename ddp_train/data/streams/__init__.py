"""The ways in which batches come to the device, a class for each."""
