"""A run whose engines, orchestrator and trainer are separate processes in one run folder.

engine         `lowroll serve FILE`: lowroll's own engine, or a vLLM
orchestrator   `lowroll orchestrate`; versions: the weights of the engines
trainer        `lowroll train`; rank_follower: its ranks other than rank 0
channels       the transport of rollouts
run_paths, heartbeat    their files and heartbeats
limits, agreement       settings that they refuse, and that they must share
role           a role and its process, which local and ray implement
supervisor     the roles of a run
ranks          the ranks of a learner
devices        the GPUs of each process
"""
