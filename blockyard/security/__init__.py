"""Authentication: keys, certificates, and checks of what is open to other machines."""
