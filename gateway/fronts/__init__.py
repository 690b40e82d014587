"""The APIs that clients speak, one package each. All of them call `gateway.generation`."""
