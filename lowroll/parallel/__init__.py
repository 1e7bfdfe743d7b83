"""Training one model with several processes: communication and sharding, applied from outside."""
