"""`python -m npuserve.cli`: runs the command `npuserve`."""

import sys

from npuserve.cli.main import main

sys.exit(main())
