"""`python -m hone` is the command `hone`."""

import sys

from hone.cli import main

if __name__ == "__main__":
    sys.exit(main())
