"""The engine process: owns requests and blocks, listens; workers and frontends attach to it."""
