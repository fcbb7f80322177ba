"""The machine that the emulated `nki` runs on: memories, numbers, cores and the trace; knows no instruction by name."""
