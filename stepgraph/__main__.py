"""`python -m stepgraph`."""

import sys

from stepgraph.cli import main

sys.exit(main())
