"""`python -m blockplane.client` is the `blockplane` command."""

import sys

from blockplane.client.cli import main

sys.exit(main())
