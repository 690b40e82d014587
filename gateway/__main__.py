"""`python -m gateway`."""

import os

# What gRPC itself writes to standard error is in no form of ours, and what matters of it reaches us as exceptions. It
# reads this when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from gateway.server import main

if __name__ == "__main__":
    main()
