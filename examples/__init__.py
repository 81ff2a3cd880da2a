"""Jobs on real data, written as a user would write them; docs/guides/examples.md has
a command of each."""
