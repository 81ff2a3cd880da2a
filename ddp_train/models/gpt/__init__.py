"""GPT-2, a decoder-only transformer."""
