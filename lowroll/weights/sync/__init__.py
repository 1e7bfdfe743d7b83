"""Weight sync: the routes of a learner's weights to its engines."""
