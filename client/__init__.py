"""The Python client and the `blockplane` command line; knows the protos and starts planes as subprocesses."""
