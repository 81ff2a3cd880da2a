"""The next token."""
