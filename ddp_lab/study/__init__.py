"""`mode=study`: runs several variants of one job with the ordinary launcher and reports on them."""
