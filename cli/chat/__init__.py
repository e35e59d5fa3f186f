"""`engine chat`: the loop over messages, its slash commands, and what is shown and kept of a conversation."""
