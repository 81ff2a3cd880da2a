"""From the frozen config to the objects of a run. Config objects stop here."""
