"""The orchestrator: from prompts to scored batches with advantages. Plain Python, no torch."""
