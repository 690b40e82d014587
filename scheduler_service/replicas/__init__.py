"""The workers' side of the scheduler: connections, epochs, and the engine that runs steps."""
