"""Jobs on real data, written as a user would write them; docs/examples.md has a command and the
result of each."""
