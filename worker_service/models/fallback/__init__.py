"""Networks computed by transformers' code over our ops. Imported only for models that our own code does not support."""
