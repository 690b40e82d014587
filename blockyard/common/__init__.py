"""Generated from `protos/blockyard/common`: messages that several APIs share."""
