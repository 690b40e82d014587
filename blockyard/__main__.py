"""The program `blockyard`. If packages are missing, it names the extra to install."""

from __future__ import annotations

import sys

from blockyard.extras import MissingPackages, naming_extra


def main() -> None:
    try:
        with naming_extra("the command line", "cli"):
            from blockyard.cli.main import main as run  # noqa: PLC0415 - it needs packages that may not be there
        run()
    except MissingPackages as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
