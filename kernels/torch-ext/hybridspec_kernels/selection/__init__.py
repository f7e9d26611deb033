"""Length selection: acceptance probabilities, the draft-side selector and the routing correction."""
