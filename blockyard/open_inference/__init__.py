"""Generated from `protos/blockyard/open_inference`: the Open Inference Protocol's messages."""
