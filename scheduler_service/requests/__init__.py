"""Requests on their way to a replica and back: admission, the registry, the dispatcher."""
