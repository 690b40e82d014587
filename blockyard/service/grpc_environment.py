"""Sets the environment variables that gRPC reads once, when it is first used.

Knows no gRPC: whoever starts a service calls `prepare` before any other import, and the program `blockyard` before it
runs a command. A client library must not, since the process is not its own.
"""

from __future__ import annotations

import os

# gRPC's event engine has threads of its own that read sockets and hand what came to the thread that waits for it.
# Without it that thread reads them itself (measured on two cores with one stream: half the context switches of a token,
# and four fifths of its CPU time).
EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def prepare() -> None:
    """Has gRPC use few threads, and leave the log to us. What the environment says already stands.

    What gRPC writes to standard error is in no form of ours, and what matters of it reaches us as exceptions.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
