"""Bridges to other frameworks and engines."""
