"""Training one model with several processes: communication and sharding."""
