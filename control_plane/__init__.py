"""Decides: scheduling, block tables, delivery. Never imports torch, knows no tensors."""
