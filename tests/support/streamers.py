"""Streamers that tests look into."""


class CountingStreamer:
    """Counts what reaches the user."""

    def __init__(self):
        self.puts = 0

    def put(self, value):
        self.puts += 1

    def end(self):
        pass
