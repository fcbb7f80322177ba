"""Checkpoints on disk: read into one form, whatever their format; knows nothing of rows or plans."""
