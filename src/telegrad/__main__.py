"""``python -m telegrad`` is the ``telegrad`` command."""

import sys

from telegrad.cli import main

sys.exit(main())
