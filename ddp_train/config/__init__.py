"""The configuration: composed once, validated whole, frozen to the run directory. Nothing here
imports torch."""
