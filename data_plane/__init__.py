"""Computes: rows, step inputs, model, sampling. Remembers only rows; decides nothing."""
