"""Who starts the roles of a run, watches them, and starts again the one that has ended.

launcher   a run by its roles
fleet      which roles there are; when each is started, and started again
member     one role, whoever starts it; process is its process
local      children of this command, on this machine; child is one of them
ray        actors of a Ray cluster; bundle is a place there, role_actor the actor in it, role_process the role
"""
