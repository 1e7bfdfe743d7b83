"""The papers' held-out sets as environments: `set/gsm8k`, `set/aime24`, `set/gpqa`, ..."""
