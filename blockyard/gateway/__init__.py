"""Generated from `protos/blockyard/gateway`: request state that gateways keep for each other."""
