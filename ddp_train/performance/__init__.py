"""The performance tips of docs/operate/tuning.md, each one switch that acts in one place."""
