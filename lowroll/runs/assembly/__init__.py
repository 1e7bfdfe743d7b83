"""The parts of a run, built from its configuration. Only `runs` and `cli` know both the
configuration and the parts' packages."""
