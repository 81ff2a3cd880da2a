"""DistributedDataParallel: one process per GPU."""
