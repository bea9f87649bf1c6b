"""`python -m sim.native`: compile the event loop. Exit code 1 where that cannot be done."""

import sys

from sim.native.compile import main

sys.exit(main())
