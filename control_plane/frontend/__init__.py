"""The frontend process: owns client streams and text; knows nothing of blocks."""
