"""The held-out sets of the papers as environments: `set/gsm8k`, `set/aime24`, `set/gpqa`, ..."""
