"""`python -m mercurygen`."""

import sys

from mercurygen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
