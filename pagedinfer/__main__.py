"""`python -m pagedinfer`: the command line."""

from __future__ import annotations

import sys

from pagedinfer.cli.main import main

sys.exit(main())
