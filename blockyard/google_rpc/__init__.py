"""Google's messages of errors: those of googleapis-common-protos where it is installed, else our copy of them.

A process can have but one description of a message. Who has that package may have loaded it already, another version of
it perhaps; who has it not needs no package more than grpcio and protobuf.
"""

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:
    from blockyard.google_rpc.google.rpc import error_details_pb2, status_pb2

__all__ = ["error_details_pb2", "status_pb2"]
