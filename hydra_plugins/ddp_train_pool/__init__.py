"""`hydra/launcher=pool`: jobs of a sweep on all devices of a host at once, in any Hydra
application. docs/sweeps.md

It imports nothing of ddp_train. Hydra imports each module here whose name has no underscore in
front, at each start.
"""
