"""`kvbaton serve`: gateway, prefill and decode processes on one machine, started and watched over."""
