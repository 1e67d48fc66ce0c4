"""Targets: a buffer plan becomes source text, and the text becomes something that runs."""
