"""What every test may rely on of the process that runs it."""

import signal

# A shell's background job starts with SIGINT ignored, and so would the processes that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
