"""How a round is made fast; used by ``simulation``, ``flower`` and the experiment runner."""
