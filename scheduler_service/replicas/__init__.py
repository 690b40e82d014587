"""The workers' side of the scheduler: connections, epochs, and the engines that run steps."""
