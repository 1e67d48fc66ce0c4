"""Profiling: named ranges and reports."""
