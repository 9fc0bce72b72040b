"""So that ``python -m halfword`` is the command line too."""

import sys

from halfword.cli import main

sys.exit(main())
