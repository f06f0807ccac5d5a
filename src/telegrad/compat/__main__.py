"""``python -m telegrad.compat program.py args…`` is ``telegrad compat``."""

import sys

from telegrad.cli import main

sys.exit(main(["compat", *sys.argv[1:]]))
