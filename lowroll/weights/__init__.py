"""The one corridor from the learner's master weights to the weights that the engine samples
from."""
