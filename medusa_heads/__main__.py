"""`python -m medusa_heads` is the command `medusa-heads`."""

import sys

from medusa_heads.cli.main import main

sys.exit(main())
