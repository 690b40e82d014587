"""The gateway's own gRPC API: InferenceService and AdminService."""
