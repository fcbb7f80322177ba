"""Tensors only: the slot formula, the reference kernels and their accelerated twins. Imports nothing of ours."""
