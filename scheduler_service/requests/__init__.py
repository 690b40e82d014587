"""Requests between gateways and replicas: admission, the registry, the dispatcher."""
