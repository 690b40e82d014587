"""Generated from `protos/blockyard/scheduler`: the messages between gateways and the scheduler."""
