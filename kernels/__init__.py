"""Block-table kernels: one meaning, one signature, several implementations."""
