"""What gateways and workers have to agree on about grammars."""
