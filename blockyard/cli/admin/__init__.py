"""`blockyard admin`: shows operators a running system and changes it."""
