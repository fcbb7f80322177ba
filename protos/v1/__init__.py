"""Generated from the .proto files beside this one by `make protos`; a test shows that they match."""
