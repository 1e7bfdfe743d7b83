"""The model families. A family is one file that says how its config.json is read and what its
tensors are called, and one row of `table.FAMILIES`."""
