"""The commands. Heavy rooms are imported inside them, so that help and errors come at once."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Exit codes: 0 done, 2 the user's mistake, 1 anything else. Ctrl-C is how `serve` is done."""
    argv = sys.argv[1:]
    try:
        from crossdock.cli.main import run

        code = run(argv)
    except KeyboardInterrupt:
        code = 0 if argv[:1] == ["serve"] else 1
    sys.exit(code)
