"""Generated from `protos/blockyard/admin`: the admin API's messages."""
