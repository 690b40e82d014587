"""Who asks: one package for each API that clients speak. All of them call `gateway.generation` and nothing below it."""
