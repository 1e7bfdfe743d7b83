"""The command line: one file for each command. Heavy imports follow the parsing of the
arguments."""
