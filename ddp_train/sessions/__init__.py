"""`ddp_train.session`: the user's own training loop, on any number of processes.
docs/guides/own_loop.md."""
