"""Records that training draws from: dictionaries, as they come from the simulator."""

import random
from collections import deque


class Replay:
    def __init__(self, capacity, seed):
        self.records = deque(maxlen=capacity)
        self.random = random.Random(seed)

    def add_episode(self, length):
        for t in range(length):
            state = [self.random.random() for _ in range(4)]
            self.records.append({"state": state, "t": t, "reward": state[0], "info": {"parent": [t]}})

    def draw(self, count):
        return self.random.sample(self.records, count)
