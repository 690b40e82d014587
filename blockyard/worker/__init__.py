"""Generated from `protos/blockyard/worker`: between scheduler and workers. The service is `worker_service`."""
