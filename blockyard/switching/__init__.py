"""Several models on one machine: which of them are loaded. Pure; `blockyard.local` starts and ends the processes."""
