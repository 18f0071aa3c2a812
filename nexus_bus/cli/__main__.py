"""`python -m nexus_bus.cli`: how a supervisor starts its workers, whatever is on the PATH."""

import sys

from nexus_bus.cli import main

if __name__ == "__main__":
    sys.exit(main())
