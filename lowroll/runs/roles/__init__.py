"""A run whose engine, orchestrator and trainer are processes of their own, in one run folder.

agreement     whether they have the same run
limits        what they do not do
place         where each of them writes, and who is who
heart         a role's sign of life, and how others look at it
versions      the weights that the engines draw from
orchestrate   `lowroll orchestrate`: makes batches; no torch
train         `lowroll train`: learns from them
serve         the engine of `lowroll serve FILE`; vllm where that is one
"""
