"""Generated from `protos/blockyard/gateway`: kept for one another by gateways. The service is `gateway`."""
