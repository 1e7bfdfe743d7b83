"""Several processes that learn one model. Sharding is applied from outside: the model knows nothing
of it."""
