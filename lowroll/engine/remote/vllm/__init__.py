"""A vLLM behind `engine.base.Engine`.

engine      the pool of one vLLM that takes weights, started here or attached to
weights     how new weights reach it: an adapter, a folder, or NCCL
nccl        full updates by vLLM's own weight transfer, from GPU to GPU
folders     the folders that a vLLM reads: its model's facts, and weight updates
server      the client of its HTTP server
probe       what a vLLM at an address can do
process     a vLLM as a child, and `reaper`, which ends it with us
"""
