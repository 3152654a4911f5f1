"""`python -m rollout …` is `rollout …`."""

import sys

from rollout.commands.main import main

sys.exit(main())
