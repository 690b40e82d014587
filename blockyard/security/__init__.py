"""Authentication: keys, certificates, and checks of ports that other machines can reach."""
