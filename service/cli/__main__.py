"""`python -m npuserve.service.cli`: the command `npuserve`."""

import sys

from npuserve.service.cli.main import main

sys.exit(main())
