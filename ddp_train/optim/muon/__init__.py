"""Muon: momentum orthogonalised for matrices, AdamW for the rest."""
