"""`python -m npuserve.service.cli`: runs the command `npuserve`."""

import sys

from npuserve.service.cli.main import main

sys.exit(main())
