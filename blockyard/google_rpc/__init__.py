"""Google's error messages: those of googleapis-common-protos if it is installed, else Blockyard's copy.

A process may register a protobuf message only once. If that package is installed, another library may have loaded it
already, perhaps in another version; if not, the copy saves a dependency beside grpcio and protobuf.
"""

try:
    from google.rpc import error_details_pb2, status_pb2
except ImportError:
    from blockyard.google_rpc.google.rpc import error_details_pb2, status_pb2

__all__ = ["error_details_pb2", "status_pb2"]
