"""How a round is made fast; imported by ``simulation`` and ``flower`` alone."""
