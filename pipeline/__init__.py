"""Trace, graph, passes, oracle and targets: the compiler of step metadata."""
