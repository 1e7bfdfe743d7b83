"""Who starts the roles of a run, watches them, and starts again the one that has ended.

local    children of this command, on this machine
child    one of them
"""
