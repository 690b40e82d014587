"""Who calls, and whether they may: keys, certificates, and what must not be open to others."""
