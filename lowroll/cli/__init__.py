"""The command line: one file a command. Heavy imports follow the parsing of the arguments."""
