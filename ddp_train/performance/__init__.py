"""The performance tips of docs/tuning.md, each one switch that acts in one place."""
