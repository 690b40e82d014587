"""Generated from `protos/blockyard/scheduler`: between gateways and scheduler. The service is `scheduler_service`."""
