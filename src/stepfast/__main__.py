"""`python -m stepfast`."""

import sys

from stepfast.cli.main import main

sys.exit(main())
