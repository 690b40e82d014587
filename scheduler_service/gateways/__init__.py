"""The gateways' side of the scheduler: one outbox for each attached gateway, and the messages."""
