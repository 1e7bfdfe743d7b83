"""The model families. A family is one file, which reads its config.json, and one row of
`table.FAMILIES`.
"""
