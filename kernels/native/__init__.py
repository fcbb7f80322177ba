"""The kernels in C++, for CPUs. Each has its twin in torch, which computes where they were not built."""
