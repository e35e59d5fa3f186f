"""One model on several devices: the processes of a tensor-parallel group, their messages, and how they end."""
