"""A run whose engines, orchestrator and trainer are processes of their own, in one run folder.

The roles themselves:
    engine         of `lowroll serve FILE`: lowroll's own, or a vLLM
    orchestrator   `lowroll orchestrate`: makes batches; versions has the weights that engines draw from
    trainer        `lowroll train`: learns from them; rank_follower has its ranks beside rank 0
    channels       the rollouts' way between the two
    run_paths      where each of them writes, and who is who
    heartbeat      how each says that it is alive, and how the others look at it
    limits         what roles do not do
    agreement      what they must have in common

Those who start them, watch them and restart one that has ended:
    role           a role as its supervisor sees it; local and ray have its process
    supervisor     the roles of a run, by `launcher: local` and `launcher: ray`
    ranks          the ranks of a learner
    devices        which GPUs each process has
"""
