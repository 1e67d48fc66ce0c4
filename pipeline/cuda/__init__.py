"""CUDA devices: memory, streams and capture by torch; one module per way to load and launch a
kernel. torch, CuPy, numba-cuda and Triton are imported only here, and only when a device is
used."""
