"""`python -m lowroll ...`: the command line, without its script."""

import sys

from lowroll.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
