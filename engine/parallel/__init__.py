"""One model on several devices: the processes of a tensor-parallel group, what they tell each other, how they end."""
