"""A wing: named variants of one job, measured by the ordinary launcher, and the report on them."""
