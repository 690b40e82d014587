"""Generated from `protos/blockyard/worker`: the messages between the scheduler and workers."""
