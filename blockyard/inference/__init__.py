"""Generated from `protos/blockyard/inference`: the public API's messages."""
