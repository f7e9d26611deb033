"""Tables of the length policy: shipped defaults, measured costs, and their fit from capture runs."""
