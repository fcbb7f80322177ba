"""The installed name. The folders stand at the top of the repository; the links beside this file join them."""

__version__ = "0.1.0"
