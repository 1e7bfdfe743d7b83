"""The launchers, which start the roles of a run, watch them, and restart one that has ended.

launcher          a run by its roles
fleet             which roles there are; when each is started, and started again
supervised_role   one role, whoever starts it; process is its process
local             children of this command, on this machine; child is one of them
ray               actors of a Ray cluster; bundle is a place there, role_actor the actor in it,
                  role_process the role
"""
