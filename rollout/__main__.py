"""`python -m rollout …` is `rollout …`. Nothing is imported here that takes time before Ctrl-C is provided for."""

import sys

from rollout.commands.interrupt import imports_begin


def main() -> int:
    """Run one command; returns its exit status."""
    imports_begin()
    from rollout.commands.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
