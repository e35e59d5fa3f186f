"""`engine chat`: the loop over messages, slash commands, how answers are shown, files of conversations."""
