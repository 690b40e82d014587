"""Sets the environment variables that gRPC reads once, when it is first used.

Does not import gRPC: services call `prepare` before any other import, and the program `blockyard` before it runs a
command. The client library must not call it, since it runs in its user's process.
"""

from __future__ import annotations

import os

# gRPC's event engine reads sockets in its own threads and hands the data to the waiting thread. Without it the waiting
# thread reads them itself (measured on two cores with one stream: half the context switches and four fifths of the CPU
# time per token).
EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def prepare() -> None:
    """Makes gRPC use few threads and write no log; variables that are already set are kept.

    gRPC's own log lines on standard error do not follow the log format, and its errors are raised as exceptions too.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", EXPERIMENTS)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
