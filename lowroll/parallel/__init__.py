"""Several processes that learn one model: what they tell each other, and who holds what.

Sharding is applied from outside: no room below knows of it.
"""
