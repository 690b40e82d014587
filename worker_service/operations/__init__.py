"""What operators have a worker do beside its steps: inspection, a closed list of operations, extensions."""
