"""What every test may rely on of the process that runs it."""

import signal

from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("blockplane", deadline=None)
settings.load_profile("blockplane")

# A shell's background job starts with SIGINT ignored, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
