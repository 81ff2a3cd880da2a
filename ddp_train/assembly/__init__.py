"""Builds the objects of a run from the frozen config. Config objects stop here."""
