"""The learner: batches of scored rollouts in, new policy versions out."""
