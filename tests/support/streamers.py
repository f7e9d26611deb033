"""Streamers that tests look into."""


class CountingStreamer:
    """Counts what reaches the user."""

    def __init__(self):
        self.puts = 0

    def put(self, value):
        self.puts += 1

    def end(self):
        pass


class TokenStreamer(CountingStreamer):
    """Keeps the tokens that reach the user, the prompt's too."""

    def __init__(self):
        super().__init__()
        self.tokens = []

    def put(self, value):
        super().put(value)
        self.tokens += value.flatten().tolist()
