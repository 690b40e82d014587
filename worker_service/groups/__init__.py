"""How the workers of a replica become a group, and cease to be one."""
