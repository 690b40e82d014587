"""Networks computed by transformers' own code over our ops. Imported only where no family of ours reads a model."""
